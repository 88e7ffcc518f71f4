"""What rules refuse to split: a warning with axis and reason, and right values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import normal
from partitioned import compiled, mesh

import tracea_jax as tracea
from tracea_jax import faults, serving
from tracea_jax.ops.channel_sums import primitive as channel_sums
from tracea_jax.ops.common import partition
from tracea_jax.ops.group_norm import primitive as group_norm
from tracea_jax.ops.max_pool.primitive import max_pool_p


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Every call is split by its rule, also where XLA computes it on each device."""
    monkeypatch.setattr(serving.Served, "is_xla", False)


def gated(x, gate, up):
    return tracea.ops.gated_matmul(x, gate, up)


def convolution(x, w, **how):
    numbers = ("NHWC", "HWIO", "NHWC")
    return tracea.transform(jax.lax.conv_general_dilated)(
        x, w, (1, 1), dimension_numbers=numbers, **how
    )


def pool(x):
    window = {"kernel": (2, 2), "strides": (2, 2), "padding": ((0, 0), (0, 0))}
    return max_pool_p.bind(x, **window, implementation=None, config=None)[0]


def norm(x, scale, bias):
    return group_norm.bind(x, scale, bias, groups=3, epsilon=1e-5, activation="none")


def attend(**how):
    return functools.partial(tracea.ops.attention, **how)


def sums(x):
    return channel_sums.bind(x, relu="none")


def paged(q, pages, lengths, indices):
    return tracea.ops.paged_attention(q, pages, pages, lengths, indices)


QKV = ((2, 8, 2, 16),) * 3
LENGTHS = np.array([3, 8], np.int32)
PAGED = (
    normal(2, 4, 16),
    normal(2, 8, 8, 16),
    np.array([9, 16], np.int32),
    np.arange(8, dtype=np.int32).reshape(2, 4),
)
DOES_NOT_DIVIDE = "6 is no multiple of 4"

# op: (function, operands or their shapes, the operand that is split and how, reason)
REFUSED = {
    "matmul": (tracea.ops.matmul, ((6, 16), (16, 8)), 0, P("x"), DOES_NOT_DIVIDE),
    "gated_matmul": (gated, ((6, 16), (16, 8), (16, 8)), 0, P("x"), DOES_NOT_DIVIDE),
    "attention, columns": (attend(), QKV, 0, P(None, None, None, "x"), "head_dim is"),
    "attention, positions": (
        attend(is_causal=True, key_value_seq_lengths=LENGTHS),
        QKV,
        0,
        P(None, "x"),
        "examples of a causal attention have keys of their own number",
    ),
    "conv2d, rows": (
        functools.partial(convolution, padding="VALID"),
        ((2, 8, 8, 8), (3, 3, 8, 16)),
        0,
        P(None, "x"),
        "rows and columns of images and results do not correspond",
    ),
    "conv2d, a group": (
        functools.partial(convolution, padding="SAME", feature_group_count=2),
        ((2, 8, 8, 8), (3, 3, 4, 16)),
        1,
        P(None, None, "x"),
        "the channels of a group are one kernel's",
    ),
    "max_pool": (
        pool,
        ((2, 12, 9, 4),),
        0,
        P(None, None, "x"),
        "rows and columns of images and results do not correspond",
    ),
    "group_norm": (norm, ((6, 5, 9), (9,), (9,)), 0, P("x"), DOES_NOT_DIVIDE),
    "channel_sums": (sums, ((6, 8),), 0, P("x"), DOES_NOT_DIVIDE),
    "elementwise": (
        tracea.ops.elementwise.multiply,
        ((6, 5), (6, 5)),
        0,
        P("x"),
        DOES_NOT_DIVIDE,
    ),
    "paged_attention": (paged, PAGED, 1, P(None, "x"), "every sequence may use any"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rule_refuses_is_gathered_with_a_warning(name):
    f, given, which, spec, reason = REFUSED[name]
    args = [x if isinstance(x, np.ndarray) else jnp.asarray(_array(x)) for x in given]
    sharding = NamedSharding(mesh(4, 2), spec)

    def split(*operands):
        operands = list(operands)
        operands[which] = jax.lax.with_sharding_constraint(operands[which], sharding)
        return f(*operands)

    op = name.partition(",")[0]
    with pytest.warns(UserWarning, match=rf"{op} gathers.*mesh axis 'x': {reason}"):
        found = compiled(split, *jax.device_put(args, NamedSharding(mesh(4, 2), P())))
    assert len(found.decisions) == 1
    right = jax.jit(f)(*args)
    for result, want in zip(
        jax.tree.leaves(found.results), jax.tree.leaves(right), strict=True
    ):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)


def _array(given):
    return normal(*given) if isinstance(given, tuple) else given


# --- rules that raise -----------------------------------------------------------------


@pytest.mark.parametrize(("place", "columns"), [("decide", 8), ("refusals", 12)])
def test_a_rule_that_raises_leaves_whole_operands_to_xla(place, columns, monkeypatch):
    """One warning with a line to report, and right values, in gradients too."""

    def failing(*_):
        raise KeyError("a fault")

    def step(x, w):
        return jax.value_and_grad(lambda w: (tracea.ops.matmul(x, w) ** 2).mean())(w)

    args = normal(16, 24), normal(24, columns)  # no program is in a cache
    expected = jax.jit(step)(*args)
    devices = mesh(2, 2)
    specs = P("x", "y"), P("y")
    split = [
        jax.device_put(a, NamedSharding(devices, spec))
        for a, spec in zip(args, specs, strict=True)
    ]
    monkeypatch.setattr(faults, "_WARNED", set())
    monkeypatch.setattr(partition.sharding, place, failing)
    line = "failed to split a matmul.*a fault"
    with pytest.warns(RuntimeWarning, match=line) as every:
        found = compiled(step, *split)
    assert len(every) == 1 and not found.kernels
    for ours, plain in zip(found.results, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
