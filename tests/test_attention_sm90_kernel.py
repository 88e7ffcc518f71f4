"""attention_sm90's kernel: its parameters, its order of tiles, its machine code."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention_problems import EVERY_OPTION as OPTIONS
from attention_problems import EVERYTHING, WHOLE, problem
from compiled import assert_clean
from device_code import compiles_device_code

from tracea_jax.device import NAMED
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit import attention_sm90_kernel as text
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar, TensorMap
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import Launch, Steps
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
USUAL = AttentionSm90Config(tile_q=128, tile_kv=128)
EVERY_OPTION = {**OPTIONS, "alibi": "distance"}


# ---- its parameters ------------------------------------------------------------------


def floats(kernel: Kernel) -> list[float]:
    scalars = [p for p in kernel.params if isinstance(p, Scalar)]
    return [p.value for p in scalars if p.dtype == "float32"]


def maps(kernel: Kernel) -> list[TensorMap]:
    return [p for p in kernel.params if isinstance(p, TensorMap)]


def test_a_head_and_an_example_are_dimensions_of_their_own():
    """A box that leaves its head or its example meets zeros, not the next one."""
    q, k, v, o = maps(text.kernel(problem(72), USUAL, H200))
    assert q.dims == o.dims == (72, 1000, 12, 2)
    assert k.dims == v.dims == (72, 1300, 4, 2)
    assert q.strides == (12 * 144, 144, 1000 * 12 * 144)
    assert k.strides == (4 * 144, 144, 1300 * 4 * 144)
    assert [m.box for m in (q, k, v, o)] == [
        (64, 128, 1, 1),
        (64, 128, 1, 1),
        (64, 128, 1, 1),
        (64, 16, 1, 1),
    ]
    q, k, v, o = maps(text.kernel(problem(192, value_dim=128), USUAL, H200))
    assert (q.dims[0], k.dims[0], v.dims[0], o.dims[0]) == (192, 192, 128, 128)


def test_operands_are_numbered_arguments_first():
    def operands(fields: dict[str, Any], **changes: Any) -> list[int]:
        config = dataclasses.replace(USUAL, **changes)
        kernel = text.kernel(problem(**fields), config, H200)
        pointers = [p.operand for p in kernel.params if isinstance(p, Pointer)]
        return [maps(kernel)[3].operand, *pointers]

    # o, then log-sum-exp, counter, lengths of queries and of keys
    none = [-1] * 8
    assert operands({}, schedule="grid") == [3, -1, -1, -1, -1, *none]
    assert operands({}) == [4, -1, 3, -1, -1, *none]
    assert operands({"kv_lengths": True}) == [5, -1, 4, -1, 3, *none]
    assert operands(EVERYTHING) == [6, 7, 5, 3, 4, *none]
    # ..., segments, sinks, slopes, bias, map, words of the mask, values
    found = operands(EVERY_OPTION)
    assert found == [13, 14, 12, 4, 5, 6, 7, 8, 9, 3, 10, 11, 2]
    assert len(set(found)) == len(found)


def test_lengths_and_heads_share_a_source():
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"batch": 7, "q_len": 77, "kv_len": 99, "heads": 8, "kv_heads": 8},
        {"scale": 0.5},
    )
    sources = {
        text.kernel(problem(is_causal=True, **fields), USUAL, H200).source
        for fields in kinds
    }
    assert len(sources) == 1
    caps = {
        text.kernel(problem(soft_cap=c, sinks=True), USUAL, H200).source
        for c in (1.0, 50.0)
    }
    assert len(caps) == 1
    windows = ((100, 0), (200, 0))
    assert 1 == len(
        {text.kernel(problem(window=w), USUAL, H200).source for w in windows}
    )


def test_the_scale_is_that_of_powers_of_two():
    kernel = text.kernel(problem(scale=0.25), USUAL, H200)
    assert floats(kernel)[0] == pytest.approx(0.25 / 0.6931471805599453)


def test_scores_of_a_cap_are_scaled_with_it():
    kernel = text.kernel(problem(scale=0.25, soft_cap=20.0), USUAL, H200)
    cap_log2, unscale, to_cap, _ = floats(kernel)
    assert cap_log2 == pytest.approx(20 / 0.6931471805599453)
    assert (unscale, to_cap) == (4.0, 0.0125)


def test_tiles_that_are_drawn_start_from_a_counter():
    call = ATTENTION_SM90.call(problem(**EVERYTHING), USUAL, H200)
    assert isinstance(call, Steps)
    assert call.operands == ("q", "k", "v", "q_lengths", "kv_lengths")
    assert call.results == ("o", "lse")
    start, attend = call.steps
    assert start.writes == ("counter",) and isinstance(attend, Launch)
    assert attend.updates == {5: 2}
    fixed = dataclasses.replace(USUAL, schedule="static")
    assert isinstance(ATTENTION_SM90.call(problem(), fixed, H200), Kernel)


def test_masks_become_a_map_before_the_kernel():
    call = ATTENTION_SM90.call(problem(**EVERY_OPTION), USUAL, H200)
    assert isinstance(call, Steps)
    options = ("q_lengths", "kv_lengths", "q_segments", "kv_segments")
    options += ("sinks", "alibi_slopes")
    assert call.operands == ("q", "k", "v", "bias", "mask", *options)
    first, *_ = call.steps
    assert (first.name, *first.reads) == ("map", "q_segments", "kv_segments", "mask")
    assert first.writes == ("map", "mask_words", "counter")
    assert {b.name: b.shape for b in call.scratch} == {
        "map": (2, 1, 8, 2),  # two words for 11 blocks
        "mask_words": (2, 1, 1000, 11 * 4),
        "counter": (1,),
    }
    attend = call.steps[-1]
    assert isinstance(attend, Launch) and "mask" not in attend.reads
    blocks = problem(mask=(1, 12, 8, 11), mask_block=(128, 128))
    call = ATTENTION_SM90.call(blocks, USUAL, H200)
    assert isinstance(call, Steps)
    assert [s.name for s in call.steps] == ["map", "attend"]
    assert call.steps[0].writes == ("map", "counter")


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((2, 12, 1000, 1300), (12 * 1300_000, 1300_000, 1300)),
        ((1, 12, 1000, 1300), (0, 1300_000, 1300)),
        ((2, 1, 1000, 1), (1000, 0, 1)),
        ((2, 1, 1, 1300), (1300, 0, 0)),
        ((1, 12, 1, 1), (0, 1, 0)),
    ],
)
def test_what_a_bias_shares_is_read_again(shape, found):
    fields = {"bias": shape, "bias_dtype": "bfloat16"}
    kernel = text.kernel(problem(**fields), USUAL, H200)
    scalars = [p for p in kernel.params if isinstance(p, Scalar)]
    row = scalars[11].value
    example, head, *_ = (p.value for p in scalars if p.dtype == "int64")
    assert (example, head, row) == found


def test_blocks_of_the_launch():
    asked, sms = problem(), H200.sm_count
    tiles = 8 * 12 * 2
    assert emit.tile_count(asked, USUAL) == tiles > sms
    grids = {s: dataclasses.replace(USUAL, schedule=s) for s in emit.SCHEDULES}
    assert emit.grid(asked, grids["grid"], sms) == tiles
    assert emit.grid(asked, grids["drawn"], sms) == sms
    assert emit.grid(asked, grids["static"], sms) == sms
    assert emit.grid(problem(q_len=5, batch=1), grids["static"], sms) == 12


def test_a_section_is_what_keys_and_values_of_fit_into_the_cache():
    long = problem(kv_len=1 << 14, batch=1, heads=32, kv_heads=8)
    assert emit.section(long) == 4 * 4  # of 8 MB, each for four heads of queries
    assert emit.section(problem(kv_len=1 << 20)) == 3
    assert emit.section(problem()) == 24


# ---- the order of tiles --------------------------------------------------------------


def expected_order(tiles_q: int, heads: int, batch: int, section: int, is_long: bool):
    """(first query, head, example) of every tile, section by section."""
    every = [(e, h) for e in range(batch) for h in range(heads)]
    ranks = range(tiles_q)
    for first in range(0, len(every), section):
        for rank in reversed(ranks) if is_long else ranks:
            for example, head in every[first : first + section]:
                yield rank * 128, head, example


@pytest.mark.nvrtc
def test_the_device_walks_tiles_section_by_section():
    lines = []
    for tiles_q, heads, batch, section in ((3, 4, 2, 3), (1, 1, 1, 1), (5, 2, 3, 6)):
        for is_long in (False, True):
            sizes = f"{tiles_q}, {heads}, {batch}, {section}, {str(is_long).lower()}"
            order = expected_order(tiles_q, heads, batch, section, is_long)
            for index, (query, head, example) in enumerate(order):
                here = f"AttentionOrder{{{sizes}}}.at({index}u, 128)"
                equal = f"{here}.query == {query} && {here}.head == {head}"
                equal += f" && {here}.example == {example}"
                lines.append(f'static_assert({equal}, "tile {index} of {sizes}");')
    assert compiles_device_code("tile/attention_order.cuh", lines)
    with pytest.raises(nvrtc.CompileError, match="tile"):
        compiles_device_code(
            "tile/attention_order.cuh", lines, change=("tiles_q - 1 - rank", "rank")
        )


# ---- machine code --------------------------------------------------------------------

TILED = {"bias": (2, 12, 1000, 1304), "bias_dtype": "bfloat16", "kv_len": 1304}
# Between them every head size class, mask, schedule and way of staging.
COMPILED = [
    (64, {}, None),
    (64, {"is_causal": True}, None),
    (64, EVERYTHING, None),
    (72, {"dtype": "float16", **EVERYTHING}, None),
    (96, {"is_causal": True}, None),
    (128, {"is_causal": True, "saves_lse": True}, None),
    (128, EVERYTHING, None),
    (128, {"dtype": "float16"}, AttentionSm90Config(tile_q=128, tile_kv=176)),
    (128, {}, AttentionSm90Config(tile_q=128, tile_kv=144)),
    (
        128,
        {"kv_lengths": True},
        AttentionSm90Config(tile_q=64, tile_kv=128, ping_pong=False, schedule="grid"),
    ),
    (160, {"window": (64, 0)}, None),
    (192, EVERYTHING, None),
    (256, {}, None),
    (256, EVERYTHING, None),
    (256, {}, AttentionSm90Config(tile_q=128, tile_kv=64, overlap=False)),
    (64, EVERY_OPTION, None),
    (128, EVERY_OPTION, None),
    (256, EVERY_OPTION, None),
    (64, {"segments": True}, AttentionSm90Config(tile_q=192, tile_kv=96)),
    (128, {"segments": True, "is_causal": True}, None),
    (192, {"soft_cap": 50.0, "is_causal": True, "value_dim": 128}, None),
    (256, {"soft_cap": 50.0, "window": (4096, 0)}, None),
    (128, {"soft_cap": 50.0, "is_causal": True}, None),
    (64, {"alibi": "distance"}, None),
    (128, {**TILED, "is_causal": True}, None),
    (128, {"bias": (1, 12, 1, 1300), "bias_dtype": "bfloat16"}, None),
    (64, {"value_dim": 256, "mask": (1, 12, 8, 11), "mask_block": (128, 128)}, None),
    (128, {**WHOLE, "saves_lse": True, "sinks": True}, None),
]


# Biases that are read for each score: heads, and keys of blocks that then spill.
EACH: dict[str, Any] = {"bias": (1, 12, 1000, 1300), "bias_dtype": "float32"}
READ: list[tuple[int, int, dict[str, Any]]] = [
    (256, 64, {**EACH, "bias_dtype": "bfloat16"}),
    (248, 64, {"bias": (1, 12, 1, 1300), "bias_dtype": "float16"}),
    (192, 96, {**EACH, "alibi": "linear"}),
    (128, 128, {**EACH, "soft_cap": 5.0}),
]


MORE: list[tuple[int, dict[str, Any], AttentionSm90Config | None]] = [
    (128, {"alibi": "linear", "is_causal": True}, None),
    (128, {**TILED, "bias_dtype": "float16"}, None),
    (64, {**TILED, "soft_cap": 5.0, "segments": True}, None),
    (256, {**TILED, "is_causal": True}, None),
    *((d, {**f, "is_causal": True}, None) for d, _, f in READ),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("head_dim", "fields", "config"),
    [*COMPILED, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in MORE)],
    ids=str,
)
def test_every_kind_of_kernel_compiles_without_spilling(head_dim, fields, config):
    asked = problem(head_dim, **fields)
    config = config or ATTENTION_SM90.heuristic(asked, H200)
    ATTENTION_SM90.check(asked, config, H200)
    assert_clean(text.kernel(asked, config, H200))


@pytest.mark.parametrize(("head_dim", "keys", "fields"), READ)
def test_biases_that_are_read_leave_blocks_fewer_keys(head_dim, keys, fields):
    large = AttentionSm90Config(tile_q=128, tile_kv=keys)
    ATTENTION_SM90.check(problem(head_dim, **fields), large, H200)  # without a mask
    masked = problem(head_dim, **fields, is_causal=True)
    with pytest.raises(ValueError, match="2 consumers have 224"):
        ATTENTION_SM90.check(masked, large, H200)
    chosen = ATTENTION_SM90.heuristic(masked, H200)
    assert (chosen.tile_q, chosen.tile_kv) == (128, keys - 16)


@pytest.mark.nvrtc
def test_a_cap_and_a_bias_that_is_read_spill_little_in_the_widest_heads():
    """Tiles of 128 queries do; those of 64 would read all keys twice as often."""
    asked = problem(256, **OPTIONS)
    config = ATTENTION_SM90.heuristic(asked, H200)
    assert (config.tile_q, config.tile_kv) == (128, 48)
    assert nvrtc.compile(text.kernel(asked, config, H200)).spill_bytes in range(25)


def test_compiled_kernels_are_of_every_kind():
    dims, fields, configs = zip(*COMPILED, strict=True)
    assert len(set(dims)) >= 6
    named = set(itertools.chain(*fields))
    assert named >= {*EVERY_OPTION, "dtype", "value_dim", "mask_block"}
    rooms = {
        emit.room(problem(d, **f), config, H200.smem_per_block_bytes)
        for d, f, c in COMPILED
        for config in [c or ATTENTION_SM90.heuristic(problem(d, **f), H200)]
    }
    assert len(rooms) == 4 and any(configs)


@pytest.mark.parametrize("tile_q", [128, 192])
def test_consumers_get_no_more_registers_than_the_launch_has(tile_q):
    """Else they wait for ever for what nobody gives back."""
    for fields in ({}, EVERY_OPTION):
        config = dataclasses.replace(USUAL, tile_q=tile_q, tile_kv=48)
        source = text.kernel(problem(64, **fields), config, H200).source
        producer, consumer = (
            int(source.split(f"k{role}Registers = ")[1].split(",")[0].split(";")[0])
            for role in ("Producer", "Consumer")
        )
        most = (1 << 16) // config.threads // 8 * 8
        asked = producer + config.consumers * consumer
        assert asked <= most * (1 + config.consumers)


@pytest.mark.nvrtc
def test_too_little_shared_memory_does_not_compile():
    kernel = text.kernel(problem(), USUAL, H200)
    wrong = kernel.source.replace(f"kSmemBytes = {kernel.smem_bytes}", "kSmemBytes = 9")
    with pytest.raises(nvrtc.CompileError, match="must request the shared memory"):
        nvrtc.compile(dataclasses.replace(kernel, source=wrong))
