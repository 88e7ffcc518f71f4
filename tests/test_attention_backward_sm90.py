"""attention_backward_sm90 without a GPU: refusals, steps, array code, machine code."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from attention_problems import default
from compiled import assert_clean

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import attention_backward_bias as bias
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.emit.kernel import TensorMap
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.ops.attention.reference import backward_reference, reference
from tracea_jax.ops.attention.workload import spec_of
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90
from tracea_jax.variants.attention_backward_steps import (
    gradient_of_sinks,
    may_be_blind,
    mean_of_blind,
)

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
USUAL = AttentionBackwardSm90Config(tile_kv=128, block_q=64, tile_q=128, block_kv=64)
LENGTHS = {"q_lengths": True, "kv_lengths": True}
EVERYTHING = {
    **{"window": (300, 7), "is_causal": True, "segments": True},
    **{"sinks": True, **LENGTHS},
}


BIASED: dict[str, Any] = {
    "bias": (1, 12, 1000, 1300),
    "bias_dtype": "bfloat16",
    "bias_gradient": True,
}
TILED: dict[str, Any] = {**BIASED, "kv_len": 1304, "bias": (1, 12, 1000, 1304)}
ALL: dict[str, Any] = {
    **EVERYTHING,
    **TILED,
    "mask": (2, 1, 1000, 1304),
    "soft_cap": 30.0,
    "alibi": "distance",
}


def problem(head_dim: int = 128, **fields: Any) -> AttentionProblem:
    usual: dict[str, Any] = {
        "direction": "backward",
        "batch": 2,
        "q_len": 1000,
        "kv_len": 1300,
        "heads": 12,
        "kv_heads": 4,
        "dtype": "bfloat16",
        "scale": head_dim**-0.5,
    }
    return AttentionProblem(head_dim=head_dim, **(usual | fields))


# ---- what it takes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"direction": "forward"}, "it computes gradients only"),
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 264}, "head_dim=264; it takes multiples of 8 up to 256"),
        (
            {"head_dim": 200, "value_dim": 128},
            "head_dim=200; it takes multiples of 8 up to 192",
        ),
        ({"head_dim": 136}, "value_dim=136; it takes multiples of 8 up to 128"),
        ({"kv_len": 0}, "there is nothing to compute"),
        (
            {"bias": (1, 12, 1000, 1300), "bias_dtype": "float64"},
            "a bias of dtype float64; it reads bfloat16, float16, float32",
        ),
        (
            {"batch": 1 << 8, "heads": 1 << 14, "kv_len": 1 << 16, **BIASED},
            "the scores have more than 2^31 - 1 tiles of 64x64",
        ),
        (
            {"q_len": 1 << 22, "kv_len": 1 << 22, "mask": (2, 12, 1 << 22, 1)},
            "the map of a mask would have more than 2^31 - 1 words",
        ),
        (
            {"aligned_at_end": True, "is_causal": True, "kv_lengths": True},
            "positions from ends",
        ),
        ({"window": (1 << 31, 0)}, "window (2147483648, 0) with a side above 10737"),
        (
            {"segments": True, "q_len": (1 << 20) + 1},
            "segments and a length above 1048",
        ),
    ],
)
def test_what_it_refuses(fields, reason):
    found = ATTENTION_BACKWARD_SM90.why_not(problem(**fields), H200)
    assert found and found.startswith(reason)


def test_what_it_takes():
    kinds: tuple[dict[str, Any], ...] = (
        {},
        EVERYTHING,
        {"dtype": "float16", "soft_cap": 30.0},
        ALL,
        {**BIASED, "bias": (1, 1, 1, 1300), "bias_dtype": "float32"},
        {"value_dim": 128, "aligned_at_end": True, "is_causal": True},
    )
    for head_dim, fields in itertools.product((8, 64, 128, 192), kinds[-1:]):
        assert (
            ATTENTION_BACKWARD_SM90.why_not(problem(head_dim, **fields), H200) is None
        )
    for head_dim, fields in itertools.product((8, 64, 128, 200, 256), kinds[:-1]):
        asked = problem(head_dim, **fields)
        assert ATTENTION_BACKWARD_SM90.why_not(asked, H200) is None
    cpu = CpuDevice(name="any", isa="avx2", cores=8)
    assert "NVIDIA" in str(ATTENTION_BACKWARD_SM90.why_not(problem(), cpu))


def test_it_is_the_default_where_cudnn_is_slower():
    assert default(problem(), H200).variant == "cudnn"
    assert default(problem(segments=True), H200).variant == "attention_backward_sm90"
    short = {"is_causal": True, "q_len": 512, "kv_len": 512}
    assert default(problem(**short), H200).variant == "attention_backward_sm90"
    long = {"q_len": 4096, "kv_len": 4096}
    for head_dim, keys in itertools.product((64, 128), (128, 512)):
        near = problem(head_dim, is_causal=True, window=(keys - 1, 0), **long)
        expected = "cudnn" if keys == 128 else "attention_backward_sm90"
        assert default(near, H200).variant == expected
    assert default(problem(**long), H200).variant == "attention_backward_sm90"
    assert (
        default(problem(64, is_causal=True), H200).variant == "attention_backward_sm90"
    )
    assert default(problem(96, is_causal=True), H200).variant == "cudnn"
    ahead = problem(window=(100, 100))
    assert default(ahead, H200).variant == "attention_backward_sm90"
    assert default(problem(q_len=64, segments=True), H200).variant == "cudnn"
    own_masks: dict[str, Any] = {"mask": (2, 1, 1024, 1300), "q_len": 1024}
    for fields in ({**TILED, "segments": True}, own_masks):
        assert default(problem(is_causal=True, **fields), H200).variant == "cudnn"
    one_mask = {**own_masks, "mask": (1, 1, 1024, 1300)}
    for fields in (TILED, one_mask):
        ours = problem(is_causal=True, **fields)
        assert default(ours, H200).variant == "attention_backward_sm90"
    biased: dict[str, Any] = {**BIASED, **long, "bias": (1, 12, 4096, 4096)}
    assert default(problem(**biased), H200).variant == "attention_backward_sm90"
    assert default(problem(96, **biased), H200).variant == "cudnn"
    alibi: dict[str, Any] = {
        "q_len": 4096,
        "kv_len": 4096,
        "alibi": "linear",
        "is_causal": True,
    }
    assert default(problem(**alibi), H200).variant == "attention_backward_sm90"
    plain = {"q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    assert default(problem(256, **plain), H200).variant == "attention_backward_sm90"
    fewer = plain | {"kv_len": 512}
    assert default(problem(256, **fewer), H200).variant == "cudnn"
    assert default(problem(200, **plain), H200).variant == "cudnn"
    short = {**alibi, "kv_len": 512}
    assert default(problem(64, **short), H200).variant == "xla"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_many_keys_are_worth_sums_in_memory(head_dim):
    many = {"q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    for fields, dq in (
        ({}, "ordered"),
        ({"is_causal": True}, "ordered"),
        ({"window": (100, 0)}, "beside"),
        ({"window": (512, 0)}, "recomputed"),
        ({"segments": True}, "beside"),
        ({"segments": True, "soft_cap": 5.0}, "recomputed"),
        ({"q_len": 512, "kv_len": 512, "is_causal": True}, "beside"),
        ({"soft_cap": 5.0}, "recomputed"),
        ({"kv_len": 512}, "recomputed"),
        ({"mask": (1, 1, 4096, 4096)}, "recomputed"),
        ({"alibi": "distance"}, "ordered"),
        ({"alibi": "distance", "segments": True}, "recomputed"),
    ):
        asked = problem(head_dim, **(many | fields))
        assert ATTENTION_BACKWARD_SM90.heuristic(asked, H200).dq == dq


def test_a_bias_leaves_room_for_sums_in_memory_beside_wide_heads():
    many = {**BIASED, "q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    many["bias"] = (1, 12, 4096, 4096)
    for head_dim, is_causal, dq in (
        (128, True, "ordered"),
        (128, False, "recomputed"),  # which was faster
        (64, True, "recomputed"),
    ):
        asked = problem(head_dim, **many, is_causal=is_causal)
        assert ATTENTION_BACKWARD_SM90.heuristic(asked, H200).dq == dq


HEAD_DIMS = (8, 72, 128, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**EVERYTHING, "soft_cap": 30.0},
        {"head_dim": 192, "value_dim": 128},
        TILED,
        {**ALL, **BIASED, "kv_len": 1300, "mask": (2, 1, 1000, 1300)},
    ],
    ids=("plain", "everything", "wide keys", "a bias", "all"),
)
def test_the_usual_config_is_one_of_the_space(head_dim, fields):
    asked = problem(**({"head_dim": head_dim} | fields))
    space = ATTENTION_BACKWARD_SM90.space(asked, H200)
    config = ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
    configs = list(space.configs())
    assert config in configs
    for other in configs[:: max(1, len(configs) // 20)]:
        ATTENTION_BACKWARD_SM90.check(asked, other, H200)
        for kernel in ATTENTION_BACKWARD_SM90.call(asked, other, H200).kernels:
            assert kernel.smem_bytes <= H200.smem_per_block_bytes


def test_the_usual_config_is_legal_wherever_the_kernel_runs():
    sizes = (8, 40, 64, 72, 96, 128, 136, 192, 200, 256)
    crowded = {"soft_cap": 30.0, "alibi": "linear", "mask": (1, 1, 1, 1)}
    kinds = ({"is_causal": True}, {"segments": True}, {"soft_cap": 30.0}, crowded)
    found = 0
    for head_dim, value_dim, fields in itertools.product(sizes, sizes, kinds):
        for length in (100, 8192):
            asked = problem(
                head_dim, value_dim=value_dim, q_len=length, kv_len=length, **fields
            )
            if ATTENTION_BACKWARD_SM90.why_not(asked, H200) is None:
                config = ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
                ATTENTION_BACKWARD_SM90.check(asked, config, H200)
                found += 1
    assert found > 100


def test_registers_and_memory_refuse_configs():
    for change, reason in (
        ({"block_q": 80}, "registers"),
        ({"tile_q": 192, "stages_kv": 3, "block_kv": 96}, "shared memory"),
        ({"block_kv": 72}, "block_kv"),
        ({"dq": "ordered", "block_q": 48}, "block_q=64"),
        ({"dq": "atomic", "tile_q": 192}, "no kernel of its own"),
        ({"tile_q": 64, "block_kv": 96}, "two of them"),
        ({"dq": "beside", "tile_q": 192, "block_kv": 64}, "as many threads"),
        ({"block_kv": 48}, "heads above 192, which leave no room"),
        ({"dq": "twice"}, "dq"),
    ):
        with pytest.raises(ValueError, match=reason):
            wrong = dataclasses.replace(USUAL, **change)
            ATTENTION_BACKWARD_SM90.check(problem(), wrong, H200)
    added = dataclasses.replace(USUAL, dq="ordered")
    masked: dict[str, Any] = {"mask": (1, 1, 1000, 1300)}
    for fields in (
        BIASED,
        masked,
        {**TILED, "alibi": "linear"},
        {"alibi": "linear", "segments": True},
        {**TILED, "window": (100, 0)},
    ):
        with pytest.raises(ValueError, match="no registers for a mask"):
            ATTENTION_BACKWARD_SM90.check(problem(**fields), added, H200)
    alibi: dict[str, Any] = {"alibi": "linear", "is_causal": True}
    for fields in (TILED, alibi):
        ATTENTION_BACKWARD_SM90.check(problem(**fields), added, H200)


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


# ---- machine code --------------------------------------------------------------------

COLUMNS = dataclasses.replace(USUAL, dq="ordered")  # each consumer has some of dq
ROWS = dataclasses.replace(COLUMNS, block_q=128)
SMALL = AttentionBackwardSm90Config(  # two blocks of one multiprocessor, in one launch
    tile_kv=64, block_q=64, tile_q=64, block_kv=64, dq="beside"
)
COMPILED: list[Any] = [
    (64, {}, None),
    (64, EVERYTHING, None),
    (72, {"dtype": "float16", "is_causal": True}, None),
    (128, {"is_causal": True}, None),
    (128, EVERYTHING, None),
    (128, {"window": (100, 100), **LENGTHS}, None),
    (
        64,
        EVERYTHING,
        AttentionBackwardSm90Config(tile_kv=128, block_q=80, tile_q=192, block_kv=80),
    ),
    (64, {"is_causal": True}, ROWS),
    (64, {**EVERYTHING, "dtype": "float16"}, ROWS),
    (128, {"is_causal": True}, COLUMNS),
    (128, EVERYTHING, COLUMNS),
    (128, {}, dataclasses.replace(COLUMNS, dq="atomic")),
    (128, {**EVERYTHING, "soft_cap": 30.0}, None),
    (64, {**EVERYTHING, "soft_cap": 30.0}, None),
    (192, {**EVERYTHING, "soft_cap": 30.0, "value_dim": 128}, None),
    (64, TILED, None),
    (128, {**TILED, "is_causal": True, **LENGTHS}, COLUMNS),
    (128, ALL, None),
    (256, {"is_causal": True}, None),
    (128, EVERYTHING, USUAL),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (128, {**TILED, "is_causal": True}, None),
            (128, {**BIASED, "bias": (2, 1, 1, 1300), "bias_dtype": "float32"}, None),
            (128, {"alibi": "linear", "is_causal": True}, None),
            (128, {"mask": (1, 1, 1000, 1300)}, None),
            (64, ALL, None),
            (192, {**ALL, "value_dim": 128}, None),
            (200, ALL, None),
            (128, {"alibi": "distance"}, COLUMNS),
            (64, {**TILED, "kv_heads": 12}, SMALL),
            (128, {"mask": (1, 1, 1000, 1300)}, dataclasses.replace(SMALL, block_q=48)),
            (64, {"alibi": "linear", "is_causal": True}, ROWS),
        )
    ),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("head_dim", "fields", "config"), COMPILED, ids=str)
def test_every_kind_of_kernel_compiles_without_spilling(head_dim, fields, config):
    asked = problem(head_dim, **fields)
    config = config or ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
    ATTENTION_BACKWARD_SM90.check(asked, config, H200)
    for kernel in ATTENTION_BACKWARD_SM90.call(asked, config, H200).kernels:
        assert_clean(kernel)
