"""Operands of mma.sync: entries copied to a tile arrive in the right registers."""

from __future__ import annotations

import itertools

import parity
import pytest

from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import simulate
from tracea_jax.ir.lanes import MMA_A, MMA_B, WARP_LANES
from tracea_jax.ir.operands import (
    BLOCK,
    MMA_TF32_A,
    MMA_TF32_B,
    OperandReads,
    TileCopies,
    operand_swizzle,
)

pytestmark = pytest.mark.once

READS = list(parity.operand_reads())
COPIES = list(parity.tile_copies())


def ptx_tf32_a(lane, i):
    group, thread = lane >> 2, lane % 4
    row = group if i in (0, 2) else group + 8
    return row, thread if i in (0, 1) else thread + 4


def ptx_tf32_b(lane, i):
    group, thread = lane >> 2, lane % 4
    return thread if i == 0 else thread + 4, group


@pytest.mark.parametrize(
    ("fragment", "ptx"), [(MMA_TF32_A, ptx_tf32_a), (MMA_TF32_B, ptx_tf32_b)]
)
def test_tf32_fragments(fragment, ptx):
    for lane, i in fragment.positions():
        assert fragment(lane, i) == ptx(lane, i)


def tile_in_memory(reads: OperandReads, rows: int) -> dict[int, tuple[int, int]]:
    """(m or n, k) of the element that starts at each byte, as the copies leave them."""
    copies = TileCopies(
        rows=rows,
        row_bytes=reads.row_bytes,
        unit_bytes=4,
        threads=64,
        swizzle=reads.swizzle,
    )
    memory: dict[int, tuple[int, int]] = {}
    for thread, i in itertools.product(range(copies.threads), range(copies.units)):
        row, byte = copies.place(thread, i)
        for offset in range(0, copies.unit_bytes, reads.itemsize):
            column = (byte + offset) // reads.itemsize
            element = (column, row) if reads.mn_major else (row, column)
            memory[copies.byte(thread, i) + offset] = element
    assert len(memory) == rows * reads.row_bytes // reads.itemsize
    return memory


def loaded(reads: OperandReads, memory, warp, block, step) -> list[list[list]]:
    """[lane][register] -> the elements it holds, as PTX describes the loads."""
    size = reads.itemsize

    def elements(byte: int, count: int) -> list:
        return [memory[byte + size * e] for e in range(count)]

    if reads.by_words:
        return [
            [elements(reads.byte(warp, lane, block, step, i), 1) for i in range(4)]
            for lane in range(WARP_LANES)
        ]
    # Row r of matrix p is the 16 bytes that lane 8 p + r points at.
    starts = [reads.byte(warp, lane, block, step) for lane in range(WARP_LANES)]
    matrices = [
        [elements(start, 16 // size) for start in starts[8 * p : 8 * p + 8]]
        for p in range(4)
    ]
    if reads.mn_major:  # .trans
        return [
            [[m[2 * (lane % 4) + e][lane // 4] for e in range(2)] for m in matrices]
            for lane in range(WARP_LANES)
        ]
    word = 4 // size  # elements of a register
    return [
        [m[lane // 4][lane % 4 * word : (lane % 4 + 1) * word] for m in matrices]
        for lane in range(WARP_LANES)
    ]


def expected(reads: OperandReads, lane: int, register: int) -> list[tuple[int, int]]:
    """(m or n, k) in the block of what mma wants in a register of a lane."""
    word = 4 // reads.itemsize
    if reads.is_a:
        fragment = MMA_A if word == 2 else MMA_TF32_A
        return [fragment(lane, word * register + e) for e in range(word)]
    fragment = MMA_B if word == 2 else MMA_TF32_B
    half, i = divmod(register, 2)  # of two fragments, the second is 8 columns on
    found = [fragment(lane, word * i + e) for e in range(word)]
    return [(n + 8 * half, k) for k, n in found]


def extents(reads: OperandReads) -> tuple[int, int, int, int]:
    """Rows of a tile for two warps if its rows hold as much, warps, blocks, steps."""
    if not reads.mn_major:
        return 2 * reads.blocks * BLOCK, 2, reads.blocks, reads.row_bytes // 32
    blocks = reads.row_bytes // reads.itemsize // BLOCK
    warps = 2 if blocks >= 2 * reads.blocks else 1
    return 4 * reads.step, warps, min(reads.blocks, blocks), 4


@pytest.mark.parametrize("reads", READS, ids=str)
def test_registers_hold_what_mma_wants(reads):
    rows, warps, blocks, steps = extents(reads)
    memory = tile_in_memory(reads, rows)
    for warp, block, step in itertools.product(*map(range, (warps, blocks, steps))):
        mn, k = (warp * reads.blocks + block) * BLOCK, step * reads.step
        held = loaded(reads, memory, warp, block, step)
        for lane, i in itertools.product(range(WARP_LANES), range(4)):
            wanted = [(mn + r, k + c) for r, c in expected(reads, lane, i)]
            assert held[lane][i] == wanted


@pytest.mark.parametrize("reads", READS, ids=str)
def test_reads_are_free_of_bank_conflicts(reads):
    _, warps, blocks, steps = extents(reads)
    places = itertools.product(*map(range, (warps, blocks, steps, reads.words)))
    for warp, block, step, word in places:
        address = reads.byte(warp, LANE, block, step, word)
        conflicts = simulate(address, width=4 if reads.by_words else 16)
        assert conflicts.is_free, (warp, block, step, word, conflicts)


def test_words_of_f32_need_their_own_swizzle():
    """Under the usual one, rows 0 and 1 put the same two chunks in the same banks."""
    own = operand_swizzle(256, 4, mn_major=True)
    usual = operand_swizzle(256, 4, mn_major=False)

    def word(mode):
        return mode(LANE % 4 * 256 + LANE // 4 * 4)

    assert simulate(word(own), width=4).worst == 1
    assert simulate(word(usual), width=4).worst == 2


@pytest.mark.parametrize("copies", COPIES, ids=str)
def test_copies_fill_a_tile_once_and_without_conflicts(copies):
    places = list(itertools.product(range(copies.threads), range(copies.units)))
    bytes_ = {copies.byte(thread, i) for thread, i in places}
    assert len(bytes_) == len(places) == 4096 // copies.unit_bytes
    assert {copies.place(thread, i) for thread, i in places} == set(
        itertools.product(
            range(copies.rows), range(0, copies.row_bytes, copies.unit_bytes)
        )
    )
    for i in range(copies.units):
        assert simulate(copies.byte(LANE, i), width=copies.unit_bytes).is_free
