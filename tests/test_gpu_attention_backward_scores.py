"""attention_backward_sm90 with biases, masks and ALiBi on an H100 or H200."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import attention_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from biased_programs import alibi, parameters, t5
from numerics import normal

import tracea_jax as tracea
from tracea_jax.ops import attention
from tracea_jax.options import device_for
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

run_and_check = functools.partial(
    attention_checks.run_and_check, ATTENTION_BACKWARD_SM90
)
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


def biased(*shape: int, dtype: str = "bfloat16", **fields: Any) -> dict[str, Any]:
    gradient = {"bias_gradient": True, "bias_dtype": dtype}
    return {"bias": shape, **gradient, **fields}


TILED = biased(1, 4, 331, 456, kv_len=456)
ALL = {
    **{"window": (300, 90), "is_causal": True, "segments": True, **LENGTHS},
    **{"mask": (1, 4, 331, 457), "soft_cap": 5.0, "sinks": True, "alibi": "distance"},
    **biased(1, 4, 331, 457),
}


@pytest.mark.parametrize(
    ("head_dim", "fields"),
    [
        (64, TILED),
        (128, {**TILED, "bias_gradient": False, "is_causal": True}),
        (128, biased(2, 4, 331, 457)),
        (64, {"alibi": "linear", "is_causal": True}),
        (128, {"alibi": "distance", "soft_cap": 5.0}),
        (64, {"mask": (1, 4, 331, 457)}),
        (128, {"mask": (2, 1, 331, 457), "is_causal": True, **LENGTHS}),
        (64, {"mask": (1, 4, 3, 4), "mask_block": (128, 128), "is_causal": True}),
        (64, {"mask": (1, 4, 4, 10), "mask_block": (100, 50)}),
        (64, {"mask": (1, 1, 1, 457), "segments": True}),
        (128, ALL),
        (64, {**ALL, **TILED, "mask": (1, 4, 331, 456)}),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_options(head_dim, fields):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 1, 456), "bfloat16"),
        ((1, 4, 331, 1), "float16"),
        ((1, 1, 331, 457), "float32"),
        ((1, 1, 1, 1), "bfloat16"),
    ],
    ids=str,
)
def test_biases_that_are_shared(shape, dtype):
    problem = dataclasses.replace(BASE, kv_len=max(shape[3], 456), soft_cap=9.0)
    run_and_check(dataclasses.replace(problem, **biased(*shape, dtype=dtype)))


@pytest.mark.parametrize("length", [1, 7, 127, 129, 1000])
def test_lengths_around_those_of_tiles(length):
    for q_len in (1, 65):
        sizes = {"q_len": q_len, "kv_len": length}
        whole = (2, 4, q_len, length)
        run_and_check(dataclasses.replace(BASE, **sizes, **biased(*whole)))
        masked = {"mask": whole, "alibi": "linear"}
        run_and_check(dataclasses.replace(BASE, **sizes, **masked, is_causal=True))


@pytest.mark.parametrize(
    ("head_dim", "more"),
    [(8, {}), (72, {"dtype": "float16"}), (192, {"value_dim": 128})],
)
def test_heads_that_fill_no_slab(head_dim, more):
    fields = {**ALL, **TILED, "mask": (1, 4, 331, 456), **more}
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize(
    ("head_dim", "fields"),
    [
        (256, {"is_causal": True, "q_len": 1000, "kv_len": 129}),
        (200, {**TILED, "dtype": "float16"}),
        (256, {**ALL, **TILED, "mask": (1, 4, 331, 456)}),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_wide_heads(head_dim, fields):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


def test_heads_that_share_keys_and_many_tiles():
    group = 3
    problem = dataclasses.replace(BASE, heads=3 * group, kv_heads=3, head_dim=128)
    long = {"q_len": 1100, "kv_len": 1152, "is_causal": True, "batch": 3}
    run_and_check(
        dataclasses.replace(problem, **long, **biased(1, 3 * group, 1100, 1152))
    )
    masked = {**long, "mask": (1, 3 * group, 1100, 1152)}
    run_and_check(dataclasses.replace(problem, **masked))


@pytest.mark.parametrize(
    "fields", [TILED, {"mask": (1, 4, 331, 457)}, {"head_dim": 256}], ids=str
)
def test_every_tile(fields):
    fields = {"head_dim": 128, "is_causal": True, **fields}
    problem = dataclasses.replace(BASE, **fields)
    sweep = functools.partial(attention_checks.sweep, ATTENTION_BACKWARD_SM90, problem)
    assert sweep("tile_kv", "block_q") + sweep("tile_q", "block_kv", "stages_kv") > 5


@pytest.mark.parametrize(
    ("head_dim", "fields"),
    [
        (128, {**TILED, "is_causal": True, **LENGTHS}),
        (128, {"alibi": "distance"}),
        (64, {"alibi": "linear", "is_causal": True}),
    ],
    ids=str,
)
def test_dq_is_added_up_in_memory(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    space = ATTENTION_BACKWARD_SM90.space(problem, device_for("cuda"))
    run_and_check(problem, next(c for c in space.configs() if c.dq == "ordered"))


# --- against XLA, every element -------------------------------------------------------


def gradients(args, *, names=(), **how):
    """Gradients of q, k, v and more arguments; the loss weights all entries."""

    def loss(*args):
        q, k, v, *more = args
        given = dict(zip(names, more, strict=True))
        o = attention(q, k, v, **given, **how).astype("float32")
        return (o * jnp.cos(jnp.arange(o.shape[-1]) + o.shape[1])).sum()

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(args)))))(*args)


def both(args, **how):
    """Ours, and those in float32 by XLA."""
    wide = [x.astype("float32") for x in args]
    found = gradients(args, implementation="attention_sm90", **how)
    return found, gradients(wide, implementation="xla", precision="highest", **how)


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert np.nanmax(np.abs(x - y)) <= 3e-2 * max(np.nanmax(np.abs(y)), 1e-3)


@pytest.mark.parametrize("kv_len", [400, 401])
def test_a_bias_of_minus_infinity_or_of_the_least_numbers_forbids_keys(kv_len):
    """Alone, and through whole blocks; the least number also all keys of a query.

    Such a query takes the mean of all values, and its scores have no gradient: they
    change nothing beside numbers as large.
    """
    args = attention_checks.arguments(300, kv_len)
    bias = normal(1, 4, 300, kv_len, seed=7).astype("bfloat16")
    least = float(jnp.finfo("bfloat16").min)
    bias = bias.at[:, 0, :, 64:256].set(-jnp.inf).at[:, 1, :, 100:300].set(least)
    bias = bias.at[:, 2, 70:200, 5:].set(-jnp.inf).at[:, 3, 40:90, :-1].set(-jnp.inf)
    found, _ = both([*args, bias.at[:, 0, 7].set(least)], names=("bias",))
    q, k, v = args
    constant, bias = q.at[:, 7, 0].set(0), bias.at[:, 0, 7].set(0)
    dq, dk, dv, dbias = both([constant, k, v, bias], names=("bias",))[1]
    dq, dbias = dq.at[:, 7, 0].set(0), dbias.at[:, 0, 7].set(0)
    assert_close(found, (dq, dk, dv, dbias))


@pytest.mark.parametrize(
    "fields",
    [
        {"is_causal": True},
        {"is_causal": True, "kv_len": 401},
        {"mask": (1, 4, 300, 400), "segments": True},
        {"mask": (1, 1, 3, 4), "mask_block": (100, 100), "kv_lengths": True},
        {"bias": (1, 1, 300, 1), "is_causal": True},
        {"bias_dtype": "float32", "local_window_size": (50, 20)},
    ],
    ids=str,
)
def test_queries_whose_keys_have_all_a_low_bias_weigh_those_that_they_see(fields):
    """Among ordinary ones, and among some that see no key."""
    rng, how = np.random.default_rng(0), dict(fields)
    shape = how.pop("bias", (1, 4, 300, how.pop("kv_len", 400)))
    kv_len = max(shape[3], 400)
    args = attention_checks.arguments(300, kv_len)
    bias = normal(*shape, seed=7).astype(how.pop("bias_dtype", "bfloat16"))
    bias = bias.at[:, 0, 5:9].set(-1e9).at[:, -1, 131:].set(-1e9)
    if shape[3] > 1:
        bias = bias.at[:, :, 7, ::3].set(-2e9).at[:, :, 140, 1::2].set(-jnp.inf)
    if "mask" in how:
        mask = rng.random(how["mask"]) < 0.7
        mask[..., 1, :] = False
        how["mask"] = jnp.asarray(mask)
        if block := how.pop("mask_block", None):
            how["mask"] = tracea.masks.block_sparse(how["mask"], block)
    if how.pop("segments", False):
        ids = np.cumsum(rng.random((2, kv_len)) < 0.02, axis=1)
        how["query_segment_ids"] = jnp.asarray(ids[:, :300], "int32")
        how["key_value_segment_ids"] = jnp.asarray(ids, "int32")
    if how.pop("kv_lengths", False):
        how["key_value_seq_lengths"] = jnp.asarray([kv_len, 230], "int32")
    found, expected = both([*args, bias], names=("bias",), **how)
    count = 4 if shape[3] > 1 else 3  # keys that share a bias have no gradient of it
    assert_close(found[:count], expected[:count])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_odd_numbers_of_a_bias_stay_in_their_rows(number):
    args = attention_checks.arguments(300, 400)
    bias = normal(1, 4, 300, 400, seed=7).astype("bfloat16")
    odd = bias.at[0, 1, 17, 200].set(number)
    found, _ = both([*args, odd], names=("bias",))
    clean, _ = both([*args, bias], names=("bias",))
    dq, dbias = np.array(found[0]), np.array(found[3])
    assert np.isnan(dq[:, 17, 1]).all() and np.isnan(dbias[0, 1, 17]).all()
    dq[:, 17, 1], dbias[0, 1, 17] = clean[0][:, 17, 1], clean[3][0, 1, 17]
    np.testing.assert_array_equal(dq, clean[0])
    np.testing.assert_array_equal(dbias, clean[3])


def test_a_query_whose_keys_are_all_forbidden_by_the_bias_gives_nan():
    args = attention_checks.arguments(300, 400)
    bias = jnp.zeros((1, 4, 300, 400), "bfloat16").at[0, 2, 131].set(-jnp.inf)
    found, expected = both([*args, bias], names=("bias",))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))


def test_keys_and_entries_that_are_not_seen_may_be_nan():
    args = attention_checks.arguments(300, 400)
    bias = normal(1, 4, 300, 400, seed=7).astype("bfloat16")
    rows = jnp.arange(300)[:, None]
    odd = jnp.where(jnp.arange(400) > rows, jnp.nan, bias)
    how = {"names": ("bias",), "is_causal": True}
    found, clean = both([*args, odd], **how)[0], both([*args, bias], **how)[0]
    for x, y in zip(found, clean, strict=True):
        np.testing.assert_array_equal(x, y)


def test_masks_with_rows_and_blocks_of_nothing():
    args = attention_checks.arguments(500, 400)
    mask = normal(1, 4, 500, 400, seed=5) > 0
    mask = mask.at[:, 0, :, 64:256].set(False).at[:, 1, 100:300].set(False)
    mask = mask.at[:, 2].set(False).at[:, 3, 7].set(False)
    assert_close(*both(args, mask=mask))
    assert_close(*both(args, mask=mask, is_causal=True))


def test_sums_of_a_bias_in_twenty_runs_have_the_same_bits():
    args = attention_checks.arguments(300, 400)
    bias = normal(1, 1, 1, 400, seed=7).astype("bfloat16")
    how = {"names": ("bias",), "implementation": "attention_sm90"}
    first = gradients([*args, bias], **how)
    for _ in range(20):
        for x, y in zip(first, gradients([*args, bias], **how), strict=True):
            np.testing.assert_array_equal(x, y)


# --- in programs ----------------------------------------------------------------------


@pytest.mark.parametrize("loss", [t5, alibi])
def test_programs_that_learn_a_bias_or_have_alibi(loss):
    """As exact as the program itself, in a length where kernels are the default."""
    given, x = parameters(2, 128), normal(1, 4096, 256, seed=9).astype("bfloat16")
    fast, plain = (jax.jit(jax.grad(f)) for f in (tracea.transform(loss), loss))
    assert "attention_backward_keys_sm90" in fast.lower(given, x).as_text()
    wide = {name: x.astype("float32") for name, x in given.items()}
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(jax.grad(loss))(wide, x.astype("float32"))

    def errors(found) -> dict[str, float]:
        return {
            name: float(jnp.abs(found[name].astype("float32") - x).max())
            for name, x in exact.items()
        }

    found, expected = errors(fast(given, x)), errors(plain(given, x))
    for name, error in found.items():
        assert error <= 2 * expected[name] + 1e-3 * float(jnp.abs(exact[name]).max())
