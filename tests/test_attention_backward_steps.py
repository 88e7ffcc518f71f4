"""The steps of attention_backward_sm90, and the array code between its kernels."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from attention_gradients import ALL, BIASED, EVERYTHING, TILED, USUAL, problem

from tracea_jax.device import NAMED
from tracea_jax.emit import attention_backward_bias as bias
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit.kernel import TensorMap
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.ops.attention.reference import backward_reference, reference
from tracea_jax.ops.attention.workload import spec_of
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90
from tracea_jax.variants.attention_backward_steps import (
    gradient_of_sinks,
    may_be_blind,
    mean_of_blind,
)

pytestmark = pytest.mark.once

H200 = NAMED["H200"]


# ---- steps ---------------------------------------------------------------------------


def test_steps_read_what_the_problem_has():
    call = ATTENTION_BACKWARD_SM90.call(problem(), USUAL, H200)
    assert call.operands == ("q", "k", "v", "o", "lse", "do")
    assert call.results == ("dq", "dk", "dv")
    assert [step.name for step in call.steps] == ["prepare", "keys", "queries"]
    call = ATTENTION_BACKWARD_SM90.call(problem(**EVERYTHING), USUAL, H200)
    lengths = ("q_lengths", "kv_lengths")
    ids = ("q_segments", "kv_segments")
    assert call.operands == ("q", "k", "v", *lengths, *ids, "sinks", "o", "lse", "do")
    assert call.results == ("dq", "dk", "dv", "dsinks")
    names = [step.name for step in call.steps]
    assert names == ["prepare", "mean", "segments", "sinks", "keys", "queries"]


def test_steps_of_masks_and_biases():
    call = ATTENTION_BACKWARD_SM90.call(problem(**ALL), USUAL, H200)
    assert call.results == ("dq", "dk", "dv", "dbias", "dsinks")
    assert [step.name for step in call.steps] == [
        *("prepare", "mean", "segments", "sinks"),
        *("mask_of_keys", "map_of_keys", "map", "map_of_bias"),
        *("bias", "keys", "queries"),
    ]
    given = {**TILED, "bias_gradient": False}
    call = ATTENTION_BACKWARD_SM90.call(problem(**given), USUAL, H200)
    assert call.results == ("dq", "dk", "dv")
    assert [step.name for step in call.steps] == ["prepare", "mean", "keys", "queries"]


@pytest.mark.parametrize(
    ("shape", "left", "parts"),
    [
        ((2, 12, 1000, 1300), None, 1),  # as many tiles as the scores have
        ((2, 12, 1, 1300), (2, 12, 128, 1300), 1),
        ((1, 1, 1000, 1300), (1, 1, 1000, 1300), 2),
        ((2, 1, 1, 1300), (2, 1, 128, 1300), 7),
        ((1, 12, 1000, 1), (1, 12, 1000, 64), 3),
        ((1, 1, 1, 1), (1, 1, 128, 64), 64),
    ],
)
def test_the_gradient_of_a_bias_is_dealt_out(shape, left, parts):
    asked = problem(**{**BIASED, "bias": shape})
    how = bias.of(asked, H200)
    call = ATTENTION_BACKWARD_SM90.call(asked, USUAL, H200)
    names = [step.name for step in call.steps]
    if left is None:
        assert how.is_whole and "terms" not in names
        assert how.dtype == "bfloat16" and how.shape == (1, *shape)
    else:
        assert not how.is_whole and "terms" in names
        assert how.shape == (parts, *left) and how.dtype == "float32"
    (kernel,) = (k for k in call.kernels if "backward_bias" in k.entry)
    rows, keys = how.shape[3:]
    tiles = -(-rows // 128) * -(-keys // bias.tile_kv(asked))
    pairs = -(-tiles // 2) * np.prod(how.shape[:3])
    assert bias.pairs(asked, how) == pairs
    assert kernel.grid[0] == min(pairs, H200.sm_count)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 3, 1, 7), (1, 3, 5, 1)])
def test_terms_of_a_bias_are_summed(shape):
    rng = np.random.default_rng(0)
    tile = (shape[2] if shape[2] > 1 else 4, shape[3] if shape[3] > 1 else 6)
    terms = rng.standard_normal((3, *shape[:2], *tile)).astype("float32")
    found = bias.sum_of_terms(np, terms, shape=shape, dtype="float32")
    axes = tuple(i for i in (2, 3) if shape[i] == 1)
    expected = terms.astype("float64").sum(0).sum(axes, keepdims=True)
    assert found.shape == shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dq", ["ordered", "atomic"])
def test_steps_that_add_up_the_gradient_of_queries(dq):
    config = dataclasses.replace(USUAL, dq=dq)
    call = ATTENTION_BACKWARD_SM90.call(problem(), config, H200)
    assert [step.name for step in call.steps] == ["prepare", "keys", "queries"]
    shapes = {buffer.name: buffer.shape for buffer in call.scratch}
    assert shapes["sums"] == (2, 12, 32, 64 * 64)
    begun = {"ordered": "turns", "atomic": "sums"}[dq]
    prepare, keys, queries = call.steps
    assert begun in prepare.writes and begun in keys.reads and begun in keys.writes
    assert "sums" in queries.reads and queries.writes == ("dq",)


@pytest.mark.parametrize("left", [None, -100, -5, 0, 3, 64, 200, 5000])
@pytest.mark.parametrize("right", [None, -40, 0, 90])
def test_tiles_take_turns_without_a_gap(left, right):
    """The formula of ``earlier_tiles`` in attention_backward_keys_sm90.cuh."""
    queries, keys = 777, 900
    seen = KeyInterval(kv_len=queries, limit=queries, left=right, right=left)
    turns = dict.fromkeys(range(13), 0)
    for tile in range(8):
        last = min(128 * tile + 128, keys) - 1
        blocks = seen.seen_blocks(128 * tile, last, 64)
        for block in range(blocks.first, blocks.last):
            behind = 64 * block - (left or 0)
            nearest = 0 if left is None or behind <= 0 else behind // 128
            assert turns[block] == tile - nearest
            turns[block] += 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"is_causal": True}, False),
        ({"kv_lengths": True}, True),
        ({"segments": True}, True),
        ({"window": (10, 0), "kv_len": 1000}, False),
        ({"window": (10, 0), "kv_len": 900}, True),
        ({"window": (10, -3)}, True),
        ({"mask": (1, 1, 1, 1)}, True),
        ({"bias": (1, 1, 1, 1)}, True),
    ],
)
def test_queries_that_may_see_no_key(fields, expected):
    assert may_be_blind(problem(**fields)) is expected


def test_maps_copy_whole_blocks():
    asked = problem(72, **EVERYTHING)
    call = ATTENTION_BACKWARD_SM90.call(asked, USUAL, H200)
    rows = emit.rows_shape(asked, USUAL)
    assert rows == (2, 12, 3, 1024)
    for kernel in call.kernels:
        for map in (x for x in kernel.params if isinstance(x, TensorMap)):
            assert all(stride % 16 == 0 for stride in map.strides)
            if map.dtype == "float32":
                assert map.dims == (1024, 3, 12, 2) and map.box == (64, 3, 1, 1)


def test_kernels_do_not_depend_on_lengths():
    for field in ("batch", "q_len", "kv_len", "heads"):
        longer = problem(**{**EVERYTHING, field: 4096})
        here = ATTENTION_BACKWARD_SM90.call(problem(**EVERYTHING), USUAL, H200)
        there = ATTENTION_BACKWARD_SM90.call(longer, USUAL, H200)
        for one, other in zip(here.kernels, there.kernels, strict=True):
            assert one.source == other.source


# ---- array code ----------------------------------------------------------------------


def test_the_mean_is_the_gradient_of_a_mean():
    """Two heads share values, and all queries of a head see none of five keys."""
    do = np.random.default_rng(0).standard_normal((2, 6, 4, 8)).astype("float32")

    def loss(v):
        return (v.mean(1).repeat(2, axis=1)[:, None] * do).sum()

    expected = jax.grad(loss)(np.zeros((2, 5, 2, 8), np.float32))
    blind = do.reshape(2, 3, 2, 4, 8).sum(2)  # tiles of two queries
    found = mean_of_blind(np, blind, group=2, kv_len=5, dtype="float32")
    for key in range(5):
        np.testing.assert_allclose(found, expected[:, key], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_sinks_is_that_of_the_reference():
    """From exponents and deltas as the first kernel leaves them; a query is padded."""
    asked = problem(8, batch=2, q_len=5, kv_len=7, heads=2, kv_heads=1, sinks=True)
    spec = spec_of(dataclasses.replace(asked, dtype="float32"))
    rng = np.random.default_rng(0)
    shapes = [(2, 5, 2, 8), (2, 7, 1, 8), (2, 7, 1, 8), (2,)]
    q, k, v, sinks = (rng.standard_normal(s).astype("float32") for s in shapes)
    do = rng.standard_normal(q.shape).astype("float32")
    o, lse = reference(q, k, v, sinks, spec=spec, lse=np.dtype("float32"))
    rows = np.zeros((2, 2, 2, 6), np.float32)
    rows[:, :, 0] = np.inf
    rows[:, :, 0, :5] = lse * np.log2(np.e)
    rows[:, :, 1, :5] = (do * o).sum(-1).swapaxes(1, 2)
    *_, expected = backward_reference(
        *(q, k, v, sinks, o, lse, do), spec=spec, sinks_gradient=True
    )
    found = gradient_of_sinks(np, sinks, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
