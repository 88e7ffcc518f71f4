"""The kernel that makes maps of blocks: its launches, its code, and what words mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from device_code import compiles_device_code

from tracea_jax.device import NAMED, CudaDevice
from tracea_jax.emit import attention_map
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import AttentionProblem
from tracea_jax.runtime import nvrtc

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
assert isinstance(H200, CudaDevice)
BASE = AttentionProblem(
    batch=2,
    q_len=1000,
    kv_len=1300,
    heads=12,
    kv_heads=4,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
TILES = AttentionSm90Config(tile_q=128, tile_kv=64)
SEGMENTS = {"segments": True}
SCORES = {"mask": (1, 12, 1000, 1300)}
BLOCKS = {"mask": (2, 1, 8, 11), "mask_block": (128, 128)}
OTHERS = {"mask": (2, 1, 10, 26), "mask_block": (100, 50)}
KINDS: tuple[dict[str, Any], ...] = (
    SEGMENTS,
    SCORES,
    BLOCKS,
    OTHERS,
    {"mask": (1, 1, 1, 1)},
    {**SEGMENTS, **SCORES},
    {**SEGMENTS, **BLOCKS},
    {**SCORES, "kv_len": 1301, "mask": (1, 1, 1000, 1301)},
)


def made(fields: dict[str, Any], config: AttentionSm90Config = TILES) -> Kernel:
    assert isinstance(H200, CudaDevice)
    return attention_map.kernel(dataclasses.replace(BASE, **fields), config, H200)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "tile", [(128, 64), pytest.param((192, 48), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_every_kind_compiles_without_spilling(fields, tile):
    config = AttentionSm90Config(tile_q=tile[0], tile_kv=tile[1])
    cubin = nvrtc.compile(made(fields, config))
    assert cubin.stack_bytes == cubin.spill_bytes == 0
    assert cubin.warnings == ()


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        (SEGMENTS, 2),  # an example's 8 tiles, and its one word of blocks
        ({**SEGMENTS, "q_len": 128 * 32 + 1}, 2 * 2),
        ({**SEGMENTS, "kv_len": 64 * 32 + 1}, 2 * 2),
        (SCORES, 12 * 8),
        ({**SEGMENTS, **SCORES}, 2 * 12 * 8),
        (BLOCKS, 2),
    ],
    ids=str,
)
def test_blocks_of_the_launch(fields, blocks):
    assert made(fields).grid == (blocks, 1, 1)


def test_operands_and_steps():
    def operands(fields: dict[str, Any], **changes: Any) -> list[int]:
        kernel = made(fields, dataclasses.replace(TILES, **changes))
        return [p.operand for p in kernel.params if isinstance(p, Pointer)]

    # segments, mask, map, words of the mask, counter
    assert operands(SEGMENTS) == [0, 1, -1, 2, -1, 3]
    assert operands(SCORES, schedule="grid") == [-1, -1, 0, 1, 2, -1]
    assert operands({**SEGMENTS, **BLOCKS}) == [0, 1, 2, 3, -1, 4]

    def steps(fields: dict[str, Any]) -> tuple[float, ...]:
        numbers = [p.value for p in made(fields).params if isinstance(p, Scalar)]
        return tuple(numbers[5:])  # row, key, example, head

    assert steps(SCORES) == (1300, 1, 0, 1300_000)
    assert steps(BLOCKS) == (11, 1, 88, 0)
    assert steps({"mask": (2, 12, 1, 1300)}) == (0, 1, 15600, 1300)
    assert steps({"mask": (1, 1, 1000, 1)}) == (1, 0, 0, 0)


def test_lengths_share_a_source():
    lengths = ((1000, 1300), (77, 1304))
    kernels = [
        made({"mask": (1, 1, *n), "q_len": n[0], "kv_len": n[1]}) for n in lengths
    ]
    assert len({kernel.source for kernel in kernels}) == 1


# ---- what attention_sm90 reads -------------------------------------------------------


def claims() -> list[str]:
    lines = []
    for first, last in ((0, 0), (0, 1), (3, 40), (31, 33), (0, 64), (64, 65), (5, 5)):
        for word in range(3):
            bits = sum(1 << i for i in range(32) if first <= 32 * word + i < last)
            found = f"bits_of_range({first}, {last}, {word})"
            lines.append(f"static_assert({found} == {bits}u);")
    for block, *which in (
        (0, 0, 0, 0),
        (77, 0, 1, 0),
        (1 << 24, 1, 0, 1),
        (5, 0, 1, 1),
    ):
        is_mixed, is_full, is_last = which
        flags = ", ".join(("false", "true")[flag] for flag in which)
        seen = f"SeenBlock::of({block}, {flags})"
        lines.append(f"static_assert({seen}.block() == {block});")
        lines.append(f"static_assert({seen}.is_mixed() == {is_mixed});")
        lines.append(f"static_assert({seen}.is_full() == {is_full});")
        lines.append(f"static_assert({seen}.is_last() == {is_last});")
    return lines


@pytest.mark.nvrtc
def test_the_device_looks_at_the_blocks_of_a_range():
    assert compiles_device_code("tile/block_map.cuh", claims())


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("first - 32 * word", "first"),
        ("count >= 32", "count > 32"),
        ("if (count <= 0) return 0;", ""),
        ("is_last << 1 | is_full << 0", "is_full << 1 | is_last << 0"),
    ],
)
def test_a_wrong_bit_is_noticed(right, wrong):
    with pytest.raises(nvrtc.CompileError):
        compiles_device_code("tile/block_map.cuh", claims(), change=(right, wrong))
