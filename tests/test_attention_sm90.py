"""attention_sm90 without a GPU: what it refuses, where it runs, its configs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention_problems import EVERY_OPTION as OPTIONS
from attention_problems import EVERYTHING, WHOLE, default, problem

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit import attention_sm90_kernel as text
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
USUAL = AttentionSm90Config(tile_q=128, tile_kv=128)
EVERY_OPTION = {**OPTIONS, "alibi": "distance"}


# ---- what it takes -------------------------------------------------------------------


def test_it_takes_positions_and_lengths():
    kinds: tuple[dict[str, Any], ...] = (
        *({}, EVERYTHING, {"dtype": "float16"}),
        *(EVERY_OPTION, {"mask": (1, 12, 8, 11), "mask_block": (128, 128)}),
    )
    for head_dim, fields in itertools.product((8, 128, 256), kinds):
        assert ATTENTION_SM90.why_not(problem(head_dim, **fields), H200) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 100}, "head_dim=100; it takes multiples of 8 up to 256"),
        ({"head_dim": 264}, "head_dim=264; it takes multiples of 8 up to 256"),
        ({"kv_len": 0}, "there is nothing to compute"),
        ({"direction": "backward"}, "it computes no gradients"),
        ({"bias": (1, 12, 1, 1), "bias_dtype": "float64"}, "a bias of dtype float64"),
        ({"value_dim": 100}, "value_dim=100; it takes multiples of 8 up to 256"),
        ({"soft_cap": 1e30}, "soft_cap=1e+30; it takes caps from 8.67e-19 to 1.05e+06"),
        (
            {"mask": (1, 1, 1 << 24, 1 << 24), "q_len": 1 << 24, "kv_len": 1 << 24},
            "the map of a mask would have more than 2^31 - 1 words",
        ),
        ({"scale": -0.1}, "scale=-0.1; it takes scales from 8.67e-19 to 1.05e+06"),
        ({"scale": 0.0}, "scale=0.0; it takes scales from 8.67e-19 to 1.05e+06"),
        ({"q_len": 1 << 31}, "a length above 1073741824"),
        ({"window": (1 << 31, 0)}, "window (2147483648, 0) with a side above 10737"),
    ],
)
def test_what_it_refuses(fields, reason):
    found = ATTENTION_SM90.why_not(problem(**fields), H200)
    assert found and found.startswith(reason)


def test_it_runs_on_hopper_alone():
    cpu = CpuDevice(name="any", isa="avx2", cores=8)
    assert "NVIDIA" in str(ATTENTION_SM90.why_not(problem(), cpu))
    newer = dataclasses.replace(H200, capability=(10, 0))
    assert "sm_90a" in str(ATTENTION_SM90.why_not(problem(), newer))


def test_it_is_the_default_of_long_sequences(without_models):
    long = {"q_len": 2048, "kv_len": 2048}
    for fields in ({"is_causal": True}, long):
        assert default(problem(**fields), H200).variant == "attention_sm90"
    assert default(problem(), NAMED["H100"]).variant == "cudnn"
    assert default(problem(), H200).variant == "attention_sm90"  # of faster memory
    for length, variant in ((512, "attention_sm90"), (640, "cudnn"), (256, "cudnn")):
        short = problem(64, q_len=length, kv_len=length)
        assert default(short, H200).variant == variant
    masked = problem(mask=(1, 1, 1000, 1300))
    assert default(masked, H200).variant == "cudnn"
    backward = problem(direction="backward")
    assert default(backward, H200).variant == "cudnn"
    assert default(problem(q_len=256), H200).variant == "cudnn"
    assert default(problem(96), H200).variant == "cudnn"  # heads that were not measured


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"segments": True}, "attention_sm90"),
        ({"soft_cap": 50.0, "sinks": True}, "attention_sm90"),
        ({"mask": (1, 12, 8, 11), "mask_block": (128, 128)}, "attention_sm90"),
        ({"head_dim": 192, "value_dim": 128, "q_len": 256}, "attention_sm90"),
        ({"head_dim": 192, "value_dim": 128, "q_len": 255}, "xla"),
        ({"bias": (1, 12, 1000, 1300), "bias_dtype": "bfloat16"}, "cudnn"),
        ({"head_dim": 256, "segments": True}, "cudnn"),  # ours was not measured
    ],
    ids=str,
)
def test_the_default_where_scores_are_changed_or_masked(
    fields, variant, without_models
):
    assert default(problem(**fields), H200).variant == variant


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"aligned_at_end": True, "is_causal": True}, (None, 300)),
        ({"aligned_at_end": True, "window": (400, 0)}, (100, 300)),
        ({"aligned_at_end": True, "is_causal": True, "q_len": 1}, (None, None)),
        (  # only the device knows
            {"aligned_at_end": True, "is_causal": True, "kv_lengths": True},
            (None, 0),
        ),
        ({}, (None, None)),
        ({"is_causal": True}, (None, 0)),
        ({"window": (100, 50)}, (100, 50)),
        ({"window": (100, 50), "is_causal": True}, (100, 0)),
        ({"window": (100, -5), "is_causal": True}, (100, -5)),
        ({"window": (999, 1299)}, (None, None)),
        ({"window": (998, 1298)}, (998, 1298)),
        ({"is_causal": True, "kv_len": 1}, (None, None)),
    ],
)
def test_sides_that_exclude_no_key_are_dropped(fields, found):
    assert rules.window(problem(**fields)) == found


# ---- configs -------------------------------------------------------------------------

HEAD_DIMS = (8, 64, 72, 96, 128, 160, 192, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("value_dim", [None, 64, 256])
@pytest.mark.parametrize(
    "fields", [{}, {"is_causal": True}, EVERYTHING, EVERY_OPTION], ids=len
)
def test_the_usual_config_is_one_of_the_space(head_dim, value_dim, fields):
    asked = problem(head_dim, value_dim=value_dim, **fields)
    space = ATTENTION_SM90.space(asked, H200)
    config = ATTENTION_SM90.heuristic(asked, H200)
    ATTENTION_SM90.check(asked, config, H200)
    assert space.index(config) is not None
    for legal in list(space.configs())[::17]:
        assert text.kernel(asked, legal, H200).smem_bytes <= H200.smem_per_block_bytes


def test_tiles_divide_the_blocks_of_a_mask_where_they_can():
    for head_dim, block, found in (
        *((64, (128, 128), (128, 128)), (256, (128, 128), (128, 64))),
        *((192, (256, 48), (128, 48)), (128, (100, 100), (128, 128))),
    ):
        shape = (1, 1, -(-1000 // block[0]), -(-1300 // block[1]))
        asked = problem(head_dim, mask=shape, mask_block=block)
        config = ATTENTION_SM90.heuristic(asked, H200)
        assert (config.tile_q, config.tile_kv) == found
        assert bool(rules.reads_mask(asked, config)) == (block == (100, 100))


@pytest.mark.parametrize(
    ("fields", "tile_kv", "whole"),
    [
        *(({}, 128, True), ({"sinks": True, "saves_lse": True}, 64, True)),
        *(({}, 96, False), ({"kv_len": 1300}, 128, False)),  # mixed; a last block's end
        *(({"mask_block": (64, 128)}, 128, False), ({"segments": True}, 128, False)),
        *(({"is_causal": True}, 128, False), ({"kv_lengths": True}, 128, False)),
        *(({"soft_cap": 5.0}, 128, False), ({"alibi": "linear"}, 128, False)),
    ],
    ids=str,
)
def test_where_tiles_see_blocks_whole_no_score_is_masked(fields, tile_kv, whole):
    asked = problem(128, **{**WHOLE, **fields})
    config = dataclasses.replace(USUAL, tile_kv=tile_kv)
    source = text.kernel(asked, config, H200).source
    for what in ("kWholeBlocks", "kStreams"):
        assert (f"{what} = true" in source) == whole
    assert "kFollows = true" in source or not whole


@pytest.mark.parametrize(
    ("fields", "overlaps"),
    [
        *(({}, True), ({"saves_lse": True}, True), ({"sinks": True}, True)),
        *(({"is_causal": True}, False), ({"soft_cap": 5.0}, False)),
        *(({"mask_block": (100, 100)}, False), ({"alibi": "linear"}, False)),
    ],
    ids=str,
)
def test_consumers_take_no_turns_where_they_see_blocks_whole(fields, overlaps):
    """Scores that are masked or added to leave no registers for overlap."""
    asked = problem(128, **{"mask": (1, 12, 4, 4), **WHOLE, **fields})
    config = ATTENTION_SM90.heuristic(asked, H200)
    assert (config.overlap, config.ping_pong) == (overlaps, not overlaps)


def test_short_sequences_have_tiles_that_fit_them():
    """A tile of 192 queries of 512 would compute a third more scores."""
    for length, tile_q in ((512, 128), (4096, 192)):
        square = problem(64, q_len=length, kv_len=length, is_causal=True)
        assert ATTENTION_SM90.heuristic(square, H200).tile_q == tile_q


def test_tiles_of_equal_work_take_whole_rounds():
    """For two sequences, 192 tiles of 192 queries take as many waves as 256 of 128."""
    for batch, tile_q in ((2, 128), (4, 192), (32, 192)):
        fields = {"batch": batch, "heads": 16, "kv_heads": 16}
        square = problem(64, q_len=1024, kv_len=1024, **fields)
        assert ATTENTION_SM90.heuristic(square, H200).tile_q == tile_q


@pytest.mark.parametrize(
    ("length", "fields", "schedule"),
    [
        *((512, {}, "static"), (2048, {}, "static"), (4096, {}, "drawn")),
        *((512, {"batch": 64}, "drawn"), (512, {"kv_lengths": True}, "drawn")),
        *((512, {"segments": True}, "drawn"), (512, {"window": (99, 0)}, "drawn")),
    ],
    ids=str,
)
def test_few_causal_tiles_are_dealt_out(length, fields, schedule):
    square = {"q_len": length, "kv_len": length, "is_causal": True}
    asked = problem(128, **({"batch": 1, "heads": 4} | square | fields))
    assert ATTENTION_SM90.heuristic(asked, H200).schedule == schedule


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "overlaps"),
    [(64, None, False), (96, None, True), (192, 128, False), (256, None, True)],
)
def test_products_overlap_the_softmax_where_that_was_faster(
    head_dim, value_dim, overlaps
):
    asked = problem(head_dim, value_dim=value_dim)
    assert ATTENTION_SM90.heuristic(asked, H200).overlap == overlaps


def test_scores_of_blocks_that_no_query_sees_are_not_computed():
    asked = problem(q_len=512, kv_len=512)
    assert emit.scores(asked, USUAL) == 512 * 512
    causal = dataclasses.replace(asked, is_causal=True)
    assert emit.scores(causal, USUAL) == (1 + 2 + 3 + 4) * 128 * 128
    window = dataclasses.replace(causal, window=(127, 0))
    assert emit.scores(window, USUAL) == (1 + 2 + 2 + 2) * 128 * 128


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_kv": 192, "stages": 4}, "bytes of shared memory"),
        ({"tile_q": 192}, "3 consumers have 128"),
        ({"tile_q": 64}, "nobody to take turns with"),
        ({"tile_kv": 120}, "tile_kv=120 must be one of"),
        ({"schedule": "random"}, "schedule='random' must be one of"),
    ],
)
def test_configs_that_are_not_legal(changes, reason):
    with pytest.raises(ValueError, match=reason):
        config = dataclasses.replace(USUAL, **changes)
        ATTENTION_SM90.check(problem(), config, H200)


def test_three_consumers_take_no_wide_heads():
    config = dataclasses.replace(USUAL, tile_q=192, tile_kv=48)
    ATTENTION_SM90.check(problem(128), config, H200)
    with pytest.raises(ValueError, match="heads up to 128; head_dim=160"):
        ATTENTION_SM90.check(problem(160), config, H200)
