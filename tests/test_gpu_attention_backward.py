"""attention_backward_sm90 on an H100 or H200: configs and awkward shapes."""

from __future__ import annotations

import dataclasses
import functools

import attention_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BackwardCases
from attention_checks import BACKWARD, EVERYTHING, arguments, assert_close
from numerics import normal

from tracea_jax import masks
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
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
run_and_check = functools.partial(checks.run_and_check, ATTENTION_BACKWARD_SM90)
sweep = functools.partial(checks.sweep, ATTENTION_BACKWARD_SM90)


class TestLikeEveryKernel(BackwardCases):
    variant = ATTENTION_BACKWARD_SM90
    forward = "attention_sm90"
    entry = "attention_backward_both_sm90"


def added(problem: AttentionProblem, dq: str):
    """The config that adds dq up in memory."""
    space = ATTENTION_BACKWARD_SM90.space(problem, device_for("cuda"))
    return next(c for c in space.configs() if c.dq == dq)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{"is_causal": True}, EVERYTHING], ids=str)
def test_every_tile_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BACKWARD, head_dim=head_dim, **fields)
    of_keys = sweep(problem, "tile_kv", "block_q")
    assert of_keys + sweep(problem, "tile_q", "block_kv", "stages_kv") > 5


@pytest.mark.parametrize("head_dim", [64, 128])
def test_soft_caps(head_dim):
    for soft_cap in (0.5, 30.0):  # a number of the launch: compiled once
        problem = dataclasses.replace(BACKWARD, head_dim=head_dim, soft_cap=soft_cap)
        run_and_check(dataclasses.replace(problem, segments=True, **EVERYTHING))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 128), (136, 8)])
def test_values_of_another_size(head_dim, value_dim):
    run_and_check(dataclasses.replace(BACKWARD, head_dim=head_dim, value_dim=value_dim))


def test_wide_keys_with_everything():
    problem = dataclasses.replace(BACKWARD, head_dim=192, value_dim=128, soft_cap=5.0)
    run_and_check(dataclasses.replace(problem, segments=True, **EVERYTHING))


def test_positions_from_the_end():
    problem = dataclasses.replace(BACKWARD, aligned_at_end=True, is_causal=True)
    run_and_check(problem)
    run_and_check(dataclasses.replace(problem, window=(100, 0), head_dim=128))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_len", [331, 700])
def test_positions_from_the_end_of_each_example(head_dim, q_len):
    args = arguments(q_len, 457, head_dim)
    of_keys, of_queries = jnp.array([457, 130]), jnp.array([q_len, 200])
    mask = masks.causal(from_end=True)
    for lengths in (
        masks.lengths(kv=of_keys),
        masks.lengths(q=of_queries, kv=of_keys),
        masks.lengths(q=of_queries),
    ):
        checks.assert_gradients_as_xla("attention_sm90", args, mask=mask & lengths)


@pytest.mark.parametrize("fields", [{}, {"segments": True}, {"sinks": True}], ids=str)
def test_positions_from_the_end_and_sums_in_memory(fields):
    given = {"is_causal": True, "aligned_at_end": True, "kv_lengths": True, **fields}
    problem = dataclasses.replace(BACKWARD, head_dim=128, **given)
    run_and_check(problem)
    run_and_check(problem, added(problem, "ordered"))


@pytest.mark.parametrize("implementation", ["attention_sm90", "attention_sm80"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_past_their_number_may_be_anything(implementation, head_dim):
    q, k, v = arguments(331, 457, head_dim)
    do, lengths = normal(*q.shape, dtype=q.dtype, seed=9), jnp.array([331, 130])
    is_query = (jnp.arange(331) < lengths[:, None])[..., None, None]

    @jax.jit
    def gradients(padding):
        def f(q, k, v):
            how = {"query_seq_lengths": lengths, "implementation": implementation}
            return attention(q, k, v, **how)

        padded_q, padded_do = (jnp.where(is_query, x, padding) for x in (q, do))
        o, pull = jax.vjp(f, padded_q.astype(q.dtype), k, v)
        return o, *pull(padded_do.astype(q.dtype))

    expected = gradients(0.0)
    for padding in (jnp.nan, jnp.inf, 3e38):
        for found, right in zip(gradients(padding), expected, strict=True):
            np.testing.assert_array_equal(found, right)


def test_more_tiles_than_multiprocessors():
    problem = dataclasses.replace(BACKWARD, batch=3, heads=8, q_len=1100, kv_len=1150)
    run_and_check(dataclasses.replace(problem, is_causal=True, head_dim=128))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, EVERYTHING], ids=str)
def test_documents(head_dim, fields):
    problem = dataclasses.replace(BACKWARD, head_dim=head_dim, segments=True, **fields)
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
        (64, "ordered", (*ADDED[:2], {**ADDED[2], "window": None}, *ADDED[3:])),
        (128, "ordered", ADDED),
        (40, "ordered", ADDED[:1]),
        (72, "atomic", ADDED[:1]),
        (64, "atomic", ({**ADDED[2], "window": None},)),
    ],
)
def test_dq_is_added_up_in_memory(head_dim, dq, kinds):
    for fields in kinds:
        problem = dataclasses.replace(BACKWARD, head_dim=head_dim, **fields)
        run_and_check(problem, added(problem, dq))


BESIDE = (
    {"is_causal": True, "q_len": 1100, "kv_len": 1150, "heads": 9, "kv_heads": 3},
    {**EVERYTHING, "segments": True},
    {"mask": (1, 4, 331, 457), "soft_cap": 5.0},
    {"bias": (1, 4, 331, 457), "bias_dtype": "float32", "sinks": True},
    {"q_len": 1, "kv_len": 1},
)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [64, 128])
def test_dq_is_computed_beside_dk_and_dv(head_dim, tile):
    for fields in BESIDE:
        problem = dataclasses.replace(BACKWARD, head_dim=head_dim, **fields)
        looks = {"mask", "bias"} & fields.keys()  # which takes registers
        config = AttentionBackwardSm90Config(
            tile_kv=tile,
            block_q=48 if looks else 64,
            tile_q=tile,
            block_kv=64,
            dq="beside",
        )
        run_and_check(problem, config)


def test_dq_in_order_has_the_same_bits_in_twenty_runs():
    """There are 17 tiles of keys, and more blocks than multiprocessors."""
    problem = dataclasses.replace(
        BACKWARD, batch=3, heads=8, q_len=1100, kv_len=2100, head_dim=128
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
    problem = dataclasses.replace(BACKWARD, head_dim=head_dim, sinks=True, **fields)
    run_and_check(problem)


# --- against XLA, every element -------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_segments_in_any_order(head_dim):
    """Also ids that no key has."""
    problem = dataclasses.replace(
        BACKWARD, head_dim=head_dim, segments=True, q_len=500, kv_len=600
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


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_behind_all_keys_gives_to_all_values(head_dim):
    args = arguments(700, 300, head_dim)
    checks.assert_gradients_as_xla("attention_sm90", args, local_window_size=(40, -50))
