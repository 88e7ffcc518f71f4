"""Arrays with explicit axes: kernels, types and collectives of plain JAX."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import normal
from partitioned import Compiled, assert_alike, compiled

import tracea_jax as tracea


@pytest.fixture
def mesh():
    kinds = (AxisType.Explicit,) * 2
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)


def both(mesh, f, arrays, specs) -> tuple[Compiled, Compiled]:
    """A program as it is written, and with kernels of ours demanded."""
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        plain = compiled(f, *args)
        with tracea.options(implementation="tracea"):
            ours = compiled(tracea.transform(f), *args)
    results = jax.tree.leaves((plain.results, ours.results))
    half = len(results) // 2
    for want, found in zip(results[:half], results[half:], strict=True):
        assert jax.typeof(found) == jax.typeof(want)
        assert found.sharding == want.sharding
    return plain, ours


def gradients(f, count):
    return jax.value_and_grad(lambda *a: (f(*a) ** 2).mean(), tuple(range(count)))


def block(x, w, bias):
    return jax.nn.gelu(x @ w + bias)


def contracted(x, w):
    return jnp.einsum("bk,kn->bn", x, w, out_sharding=P("x", None))


def gated(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def attended(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def convolved(x, w):
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y)


def layers(x, ws):
    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(jax.nn.gelu(h @ w)), None

    return jax.lax.scan(layer, x, ws)[0]


COLUMNS = P(None, "y")
HEADS = P("x", None, "y")
# name: (function, shapes, specs, kernels of the step)
PROGRAMS = {
    "rows and columns": (
        block,
        ((8, 6, 16), (16, 32), (32,)),
        (P("x"), COLUMNS, P("y")),
        3,
    ),
    "contraction": (contracted, ((8, 16), (16, 32)), (P("x", "y"), P("y")), 3),
    "gated": (gated, ((8, 16), (16, 32), (16, 32)), (P("x"), COLUMNS, COLUMNS), 6),
    "attention": (attended, ((4, 16, 4, 8),) * 3, (HEADS,) * 3, 2),
    "conv2d": (convolved, ((4, 16, 8, 8), (3, 3, 8, 16)), (P("x"), P()), 3),
    "scan": (layers, ((8, 24), (3, 24, 24)), (P("x"), P()), 4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_run_kernels(name, mesh):
    f, shapes, specs, kernels = PROGRAMS[name]
    arrays = [normal(*shape) for shape in shapes]
    plain, ours = both(mesh, gradients(f, len(shapes)), arrays, specs)
    assert_alike(plain, ours)
    assert sum(ours.kernels.values()) >= kernels and ours.work.left == 0


def test_ops_have_the_shardings_that_lax_gives(mesh):
    def ours(x, w, gate, up):
        y = tracea.ops.matmul(x, w, activation="gelu", implementation="tracea")
        return tracea.ops.gated_matmul(y, gate, up, implementation="tracea")

    def written(x, w, gate, up):
        y = jax.nn.gelu(x @ w)
        return jax.nn.silu(y @ gate) * (y @ up)

    args = normal(8, 16), normal(16, 24), normal(24, 32), normal(24, 32, seed=1)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (P("x"), P(), COLUMNS, COLUMNS), strict=True)
    ]
    with jax.set_mesh(mesh):
        plain, fast = (compiled(gradients(f, 4), *placed) for f in (written, ours))
    assert_alike(plain, fast)
    assert fast.work.left == 0
    pairs = zip(*map(jax.tree.leaves, (fast.results, plain.results)), strict=True)
    assert all(jax.typeof(found) == jax.typeof(want) for found, want in pairs)


def test_what_lax_finds_ambiguous_is_its_error(mesh):
    x = jax.device_put(normal(8, 16), NamedSharding(mesh, P(None, "x")))
    w = jax.device_put(normal(16, 8), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        for f in (jnp.matmul, tracea.ops.matmul, tracea.transform(jnp.matmul)):
            with pytest.raises(Exception, match="out_sharding"):  # of no public type
                jax.jit(f)(x, w)


@pytest.mark.parametrize(
    "wanted", [P("x", None), P("x", "y"), P(None, None), P(("x", "y"), None)], ids=str
)
def test_a_split_contraction_is_summed_into_the_wanted_sharding(wanted, mesh):
    """In derivatives too, as by lax."""

    def ours(x, w, up, bias):
        how = {"out_sharding": wanted, "implementation": "tracea"}
        y = tracea.ops.matmul(x, w, bias=bias, activation="silu", **how)
        return y + tracea.ops.gated_matmul(x, w, up, **how)

    def written(x, w, up, bias):
        product = functools.partial(jnp.matmul, out_sharding=wanted)
        bias = jax.sharding.reshard(bias, P(wanted[1]))
        y = jax.nn.silu(product(x, w) + bias)
        return y + jax.nn.silu(product(x, w)) * product(x, up)

    args = normal(8, 16), normal(16, 32), normal(16, 32, seed=1), normal(32)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (P("x", "y"), P("y"), P("y"), P()), strict=True)
    ]
    with jax.set_mesh(mesh):
        plain, fast = (compiled(gradients(f, 4), *placed) for f in (written, ours))
    assert fast.work.left == 0 and fast.kernels
    pairs = zip(*map(jax.tree.leaves, (fast.results, plain.results)), strict=True)
    for found, want in pairs:
        assert jax.typeof(found) == jax.typeof(want)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_shardings_that_lax_refuses_are_refused(mesh):
    x, w = normal(8, 16), normal(16, 8)
    automatic = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for wanted, of in ((P("x"), None), (P("x"), automatic), (P("z"), mesh)):
        with jax.set_mesh(of) if of else contextlib.nullcontext():
            for f in (jnp.matmul, tracea.ops.matmul):
                with pytest.raises(Exception, match="axis|mesh"):  # of no public type
                    jax.jit(functools.partial(f, out_sharding=wanted))(x, w)
            with pytest.raises(Exception, match="axis|mesh"):
                tracea.ops.gated_matmul(x, w, w, out_sharding=wanted)


def test_without_a_mesh_in_the_context(mesh):
    x = jax.device_put(normal(8, 16), NamedSharding(mesh, P("x")))
    w = jax.device_put(normal(16, 24), NamedSharding(mesh, COLUMNS))
    b = jax.device_put(normal(24), NamedSharding(mesh, P("y")))
    with tracea.options(implementation="tracea"):
        found = compiled(tracea.transform(gradients(block, 3)), x, w, b)
    assert found.work.left == 0
    want = jax.jit(gradients(block, 3))(x, w, b)
    for result, right in zip(
        jax.tree.leaves(found.results), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)
        assert jax.typeof(result) == jax.typeof(right)
