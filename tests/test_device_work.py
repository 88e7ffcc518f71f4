"""Work and bytes read from compiled programs, against counts by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from device_work import Collective, measured
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import normal

import tracea_jax as tracea

pytestmark = pytest.mark.once

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def work(f, *args):
    return measured(text_of(jit(f).lower(*args)))


def text_of(lowered):
    text = lowered.compile().as_text()
    assert text is not None
    return text


def test_bytes_of_each_collective_in_a_loop():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        def once(x, _):
            x = x + lax.psum(x, "b")  # 2 x 3/4 of 480 bytes
            x = x + lax.ppermute(x, "a", [(0, 1), (1, 0)]).T.reshape(x.shape)  # 480
            gathered = lax.all_gather(x, "b")  # 3/4 of 1920
            x = x + lax.psum_scatter(jnp.sin(gathered), "b").reshape(x.shape)  # 3 x 480
            return lax.all_to_all(x, "b", 0, 1, tiled=True).reshape(x.shape), None

        return lax.scan(once, x, length=5)[0]

    every = P(("a", "b"))
    found = work(
        jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every), normal(64, 15)
    )
    kinds = {c.kind: (c.arrays, c.sent) for c in found.collectives}
    assert {k: sent for k, (_, sent) in kinds.items()} == {
        "all-reduce": 5 * 720,
        "collective-permute": 5 * 480,
        "all-gather": 5 * 1440,
        "reduce-scatter": 5 * 1440,
        "all-to-all": 5 * 360,
    }
    assert kinds["all-reduce"][0] == 5 and found.sent == 5 * 4440
    assert (found.flops, found.calls, found.left) == (0, 0, 0)


@pytest.mark.parametrize(
    "groups",
    [
        "mesh['a'=2,'b'=4] {'b'}",
        "mesh['a'=8] {'a':(2)4}",
        "mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
        "mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}",
        "[2,4]<=[8]",
        "[2,4]<=[2,4]T(1,0)",
        "{{0,1,2,3},{4,5,6,7}}",
    ],
)
def test_notations_of_groups(groups):
    text = f"""
ENTRY %main (x: f32[8]) -> (bf16[8], f32[2,4]) {{
  %x = (bf16[8]{{0}}, f32[2,4]{{1,0}}) parameter(0)
  ROOT %y = (bf16[8]{{0}}, f32[2,4]{{1,0}}) all-reduce(%x, %x), channel_id=1, \
replica_groups={groups}, use_global_device_ids=true, to_apply=%add
}}
"""
    assert measured(text).collectives == (Collective("all-reduce", 2, 72),)


def test_products_by_xla_and_by_kernels_are_of_the_same_work():
    x, w, v = normal(2, 9, 7), normal(2, 7, 12), normal(2, 13, 2, 3)

    def step(attention, x, w, v):
        def f(x, w, v):
            q = jnp.einsum("bij,bjk->bik", x, w).reshape(2, 9, 4, 3)
            k = jnp.tile(q[:, :, ::2], (1, 2, 1, 1))[:, :13]
            return attention(q, k, v)

        y, pull = jax.vjp(f, x, w, v)
        return y, pull(y)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    left = work(functools.partial(step, plain), x, w, v)
    with tracea.options(implementation="tracea"):
        f = tracea.transform(functools.partial(step, tracea.ops.attention))
        ours = work(f, x, w, v)
    assert ours.flops == left.flops
    assert ours.calls == 5 and left.left == 9 and ours.left == left.calls == 0


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_are_of_the_same_work_in_each_direction(stride):
    images, weights = normal(2, 9, 7, 3), normal(3, 2, 3, 5)

    def f(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride, 1),
            ((1, 1), (0, 1)),
            rhs_dilation=(1, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def brute_force() -> int:
        height, width = (9 + 2 - 3) // stride + 1, 7 + 1 - 3 + 1
        rows = [stride * o + t - 1 for o in range(height) for t in range(3)]
        columns = [o + 2 * t for o in range(width) for t in range(2)]
        pairs = sum(0 <= r < 9 for r in rows) * sum(0 <= c < 7 for c in columns)
        return 2 * 2 * pairs * 3 * 5

    def step(x, w):
        return jax.vjp(f, x, w)[1](f(x, w))

    plain, ours = (work(g, images, weights) for g in (step, tracea.transform(step)))
    assert plain.flops == ours.flops == 3 * brute_force()
    assert plain.left == 3 and ours.calls + ours.left == 3 and ours.calls >= 2


def test_depthwise_and_scanned_products():
    images, weights = normal(2, 5, 5, 4), normal(3, 3, 1, 4)

    def f(x, w):
        def once(x, _):
            y = lax.conv_general_dilated(
                x,
                w,
                (1, 1),
                "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=4,
            )
            return jnp.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0))), None

        return lax.scan(once, x, length=3)[0]

    assert work(f, images, weights).flops == 3 * 2 * 2 * 9 * 9 * 4


def test_what_is_not_known_is_an_error():
    x = normal(4)
    endless = jit(lambda x: lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x))
    with pytest.raises(ValueError, match="number of runs"):
        measured(text_of(endless.lower(x)))
    call = '%y = f32[4]{0} custom-call(%x), custom_call_target="tracea_new_v1"'
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4] parameter(0)\n  {call}"
    with pytest.raises(ValueError, match="work of tracea_new_v1"):
        measured(text + "\n}\n")
    assert measured(text.replace("tracea_", "other_") + "\n}\n").flops == 0
