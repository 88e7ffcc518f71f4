"""attention_backward_sm90 on an H100 or H200: configs and awkward shapes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from attentions import lengths
from numerics import normal
from spaces import one_of_each

from tracea_jax.ops import attention
from tracea_jax.ops.attention import workload as bench
from tracea_jax.ops.attention.primitives import attention_backward_p
from tracea_jax.ops.attention.reference import backward_reference
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

NAME = "attention_backward_sm90"
BASE = AttentionProblem(
    direction="backward",
    batch=2,
    q_len=331,
    kv_len=457,
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
LENGTHS = {"q_lengths": True, "kv_lengths": True}
EVERYTHING = {"window": (200, 90), "is_causal": True, **LENGTHS}


def run_and_check(problem: AttentionProblem, config=None) -> None:
    """Runs the kernels in buffers full of NaN and compares with float64.

    Two runs must give the same bits, but where dq is added up in no order.
    """
    device = device_for("cuda")
    config = config or ATTENTION_BACKWARD_SM90.heuristic(problem, device)
    inputs = bench.operands(problem, seed=3)
    run = functools.partial(
        bench.execute, problem=problem, choice=Choice(variant=NAME, config=config)
    )
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    found = call(poison, *inputs)
    in_no_order = config.dq == "atomic"
    for first, second in list(zip(found, call(again, *inputs), strict=True))[
        in_no_order:
    ]:
        np.testing.assert_array_equal(first, second, strict=True)
    error = bench.error(problem, device, inputs, found, seed=3)
    assert error <= 1, f"{error:.3g} of the allowed error: {config}"


def added(problem: AttentionProblem, dq: str):
    """The config that adds dq up in memory."""
    space = ATTENTION_BACKWARD_SM90.space(problem, device_for("cuda"))
    return next(c for c in space.configs() if c.dq == dq)


def sweep(problem: AttentionProblem, *fields: str) -> int:
    """``run_and_check`` of a config for each combination of these fields."""
    device = device_for("cuda")
    configs = one_of_each(ATTENTION_BACKWARD_SM90.space(problem, device), *fields)
    choices = [Choice(variant=NAME, config=config) for config in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            run_and_check(problem, config)
    return len(configs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{"is_causal": True}, EVERYTHING], ids=str)
def test_every_tile_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    of_keys = sweep(problem, "tile_kv", "block_q")
    assert of_keys + sweep(problem, "tile_q", "block_kv", "stages_kv") > 5


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 112])
def test_heads_that_fill_no_slab(head_dim):
    for fields in ({}, {"dtype": "float16", **EVERYTHING}):
        run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize("kv_len", [1, 65, 127, 128, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_around_those_of_tiles(kv_len, is_causal):
    for q_len in (1, 64, 129, 1000):
        sizes = {"q_len": q_len, "kv_len": kv_len, "is_causal": is_causal}
        run_and_check(dataclasses.replace(BASE, **sizes))


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (128, 128), (3, 1000)], ids=str)
def test_windows(window):
    for is_causal in (False, True):
        problem = dataclasses.replace(
            BASE, q_len=777, kv_len=777, window=window, is_causal=is_causal
        )
        run_and_check(problem)
        run_and_check(dataclasses.replace(problem, head_dim=128, **LENGTHS))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_that_share_keys(group):
    run_and_check(dataclasses.replace(BASE, heads=3 * group, kv_heads=3))
    run_and_check(dataclasses.replace(BASE, heads=group, kv_heads=1, is_causal=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_soft_caps(head_dim):
    for soft_cap in (0.5, 30.0):  # a number of the launch: compiled once
        problem = dataclasses.replace(BASE, head_dim=head_dim, soft_cap=soft_cap)
        run_and_check(dataclasses.replace(problem, segments=True, **EVERYTHING))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 128), (136, 8)])
def test_values_of_another_size(head_dim, value_dim):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, value_dim=value_dim))


def test_wide_keys_with_everything():
    problem = dataclasses.replace(BASE, head_dim=192, value_dim=128, soft_cap=5.0)
    run_and_check(dataclasses.replace(problem, segments=True, **EVERYTHING))


def test_positions_from_the_end():
    problem = dataclasses.replace(BASE, aligned_at_end=True, is_causal=True)
    run_and_check(problem)
    run_and_check(dataclasses.replace(problem, window=(100, 0), head_dim=128))


def test_more_tiles_than_multiprocessors():
    problem = dataclasses.replace(BASE, batch=3, heads=8, q_len=1100, kv_len=1150)
    run_and_check(dataclasses.replace(problem, is_causal=True, head_dim=128))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, EVERYTHING], ids=str)
def test_documents(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, segments=True, **fields)
    run_and_check(problem)
    run_and_check(dataclasses.replace(problem, q_len=3000, kv_len=3000))


ADDED = (
    {"q_len": 1000, "kv_len": 129, "batch": 3},
    {"is_causal": True, "q_len": 2100, "kv_len": 2150, "heads": 8, "kv_heads": 8},
    {**EVERYTHING, "segments": True},
    {"window": (128, 128), "q_len": 777, "kv_len": 777},
    {"q_len": 1, "kv_len": 1},
)


@pytest.mark.parametrize(
    ("head_dim", "dq", "kinds"),
    [
        (64, "ordered", ADDED),
        (128, "ordered", ADDED),
        (40, "ordered", ADDED[:1]),
        (72, "atomic", ADDED[:1]),
        (64, "atomic", ADDED[2:3]),
    ],
)
def test_dq_is_added_up_in_memory(head_dim, dq, kinds):
    for fields in kinds:
        problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
        run_and_check(problem, added(problem, dq))


def test_dq_in_order_has_the_same_bits_in_twenty_runs():
    """Of 17 tiles of keys, and more blocks of threads than multiprocessors."""
    problem = dataclasses.replace(
        BASE, batch=3, heads=8, q_len=1100, kv_len=2100, head_dim=128
    )
    inputs = bench.operands(problem, seed=3)
    choice = Choice(variant=NAME, config=added(problem, "ordered"))
    call = jax.jit(functools.partial(bench.execute, problem=problem, choice=choice))
    first = call(*inputs)
    for _ in range(20):
        for x, y in zip(first, call(*inputs), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{}, {"segments": True, **EVERYTHING}], ids=str)
def test_sinks(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, sinks=True, **fields)
    run_and_check(problem)


# --- against XLA, every element -------------------------------------------------------


def arguments(q_len: int, kv_len: int, head_dim: int = 64):
    k = (2, kv_len, 2, head_dim)
    shapes = ((2, q_len, 4, head_dim), k, k)
    return [normal(*s, seed=i).astype("bfloat16") for i, s in enumerate(shapes)]


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert np.nanmax(np.abs(x - y)) <= 3e-2 * max(np.nanmax(np.abs(y)), 1e-3)


def assert_as_xla(args, **settings) -> None:
    """Gradients through our forward attention and our backward pass."""

    def gradients(args, **how):
        def loss(*args):
            o = attention(*args, **settings, **how).astype("float32")
            return (o * jnp.cos(jnp.arange(o.shape[-1]) + o.shape[1])).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    wide = [x.astype("float32") for x in args]
    found = gradients(args, implementation="attention_sm90")
    assert_close(found, gradients(wide, implementation="xla", precision="highest"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_query_that_sees_no_key_gives_to_all_values(head_dim):
    args = arguments(700, 300, head_dim)
    assert_as_xla(args, local_window_size=(40, 0))
    assert_as_xla(args, local_window_size=(40, -50))
    assert_as_xla(args, key_value_seq_lengths=lengths(0, 300))
    some = {"key_value_seq_lengths": lengths(0, 17), "is_causal": True}
    assert_as_xla(args, query_seq_lengths=lengths(130, 700), **some)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_segments_in_any_order(head_dim):
    """Also ids that no key has."""
    problem = dataclasses.replace(
        BASE, head_dim=head_dim, segments=True, q_len=500, kv_len=600
    )
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(0, 3, (2, n)), jnp.int32) for n in (500, 600)]
    ids[0] = ids[0].at[:, 50:90].set(77)
    inputs = [*arguments(500, 600, head_dim), *ids]
    spec = bench.spec_of(problem)
    o, lse = bench._forward(inputs, spec)
    do = normal(*o.shape, seed=9).astype(o.dtype)
    which = {"bias_gradient": False, "sinks_gradient": False}
    how = {"spec": spec, "implementation": NAME, "config": None, **which}
    found = attention_backward_p.bind(*inputs, o, lse, do, **how)
    with jax.default_matmul_precision("highest"):
        wide = [x if x.dtype == jnp.int32 else x.astype("float32") for x in inputs]
        args = (*wide, o, lse, do.astype("float32"))
        assert_close(found, backward_reference(*args, spec=spec, **which))


def test_large_scores():
    q, k, v = arguments(300, 400)
    for factor in (5.0, 30.0):
        assert_as_xla([q * factor, k, v], is_causal=True)


def test_nan_and_infinities_stay_in_their_heads():
    q, k, v = arguments(300, 400)
    odd = q.at[0, 17, 1, 3].set(jnp.nan)

    def gradients(q):
        def loss(*args):
            return attention(*args, implementation="attention_sm90").sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    found, clean = gradients(odd), gradients(q)
    assert np.isnan(np.asarray(found[0][0, 17, 1])).all()
    for x, y in zip(found, clean, strict=True):
        x, y = np.array(x), np.array(y)
        x[0, 17, 1] = y[0, 17, 1] = 0
        x, y = x[1:], y[1:]  # the other example
        np.testing.assert_array_equal(x, y)


# --- in programs ----------------------------------------------------------------------


def test_loops_and_maps_around_it():
    q, k, v = arguments(300, 400)

    def loss(q, k, v):
        return (attention(q, k, v, implementation="attention_sm90") ** 2).sum()

    both = jax.grad(loss, argnums=(0, 1))
    expected = both(q, k, v)
    stacked = jnp.stack([q, q + q])
    mapped = jax.vmap(both, in_axes=(0, None, None))(stacked, k, v)
    for x, y in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(x[0], y)
    saved = jax.grad(jax.checkpoint(loss), argnums=(0, 1))(q, k, v)
    for x, y in zip(saved, expected, strict=True):
        np.testing.assert_array_equal(x, y)
