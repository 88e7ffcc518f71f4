"""Staging: registers stored by the instructions' rules are read back as the tile."""

import itertools

import pytest

from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import simulate
from tracea_jax.ir.lanes import MMA_A, wgmma_accumulator
from tracea_jax.ir.register_operand import paired_column
from tracea_jax.ir.staging import (
    STMATRIX_X4,
    accumulator_pair_byte,
    staggered_block,
    staggered_half,
    stmatrix_x4_byte,
    transposed_pair_byte,
)
from tracea_jax.ir.swizzle import SWIZZLE_128B

pytestmark = pytest.mark.once

WARPS, LANES = range(4), range(32)


def assert_staged(memory, itemsize):
    """A TMA store reads the tile: chunk index ^= row mod 8, of 16-byte chunks in a row.

    Stated in rows and chunks, independently of the formula under test.
    """
    columns = 128 // itemsize
    for row in range(64):
        for col in range(columns):
            chunk, rest = divmod(col * itemsize, 16)
            found = memory.pop(128 * row + 16 * (chunk ^ (row % 8)) + rest)
            assert found == (row, col)
    assert not memory


def store_matrices(memory, addresses, registers):
    """stmatrix.x4: matrix p, row r is at lane 8p + r's address, two columns a lane."""
    for p in range(4):
        for r in range(8):
            start = addresses[8 * p + r]
            assert start % 16 == 0
            for t in range(4):
                low, high = registers[4 * r + t][2 * p : 2 * p + 2]
                memory[start + 4 * t] = low
                memory[start + 4 * t + 2] = high


def test_a_16_bit_tile_is_staged_by_stmatrix():
    accumulator, memory = wgmma_accumulator(64), {}
    for warp in WARPS:
        threads = [32 * warp + lane for lane in LANES]
        for block in range(0, 8, 2):
            held = range(4 * block, 4 * block + 8)
            registers = [[accumulator(thread, i) for i in held] for thread in threads]
            addresses = [stmatrix_x4_byte(thread, block) for thread in threads]
            store_matrices(memory, addresses, registers)
    assert_staged(memory, itemsize=2)


def test_ldmatrix_reads_what_stmatrix_stores_at_the_same_addresses():
    """A residual is read from where the result that takes its place is staged."""
    tile = {}
    for row, col in itertools.product(range(64), range(64)):
        tile[128 * row + 16 * (col // 8 ^ row % 8) + col % 8 * 2] = (row, col)
    accumulator = wgmma_accumulator(64)
    for warp, block in itertools.product(WARPS, range(0, 8, 2)):
        threads = [32 * warp + lane for lane in LANES]
        addresses = [stmatrix_x4_byte(thread, block) for thread in threads]
        for lane, thread in enumerate(threads):
            for p in range(
                4
            ):  # ldmatrix.x4: matrix p, row l/4, columns 2 (l%4) and next
                start = addresses[8 * p + lane // 4] + 4 * (lane % 4)
                found = tile[start], tile[start + 2]
                first = 4 * block + 2 * p
                assert found == (
                    accumulator(thread, first),
                    accumulator(thread, first + 1),
                )


def test_an_f32_tile_is_staged_by_pairs():
    accumulator, memory = wgmma_accumulator(32), {}
    for thread in range(128):
        for j in range(4):
            for half in range(2):
                byte = accumulator_pair_byte(thread, j, half)
                i = 4 * staggered_block(thread, j) + 2 * half
                memory[byte] = accumulator(thread, i)
                memory[byte + 4] = accumulator(thread, i + 1)
    assert_staged(memory, itemsize=4)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_transposed_tile_is_staged_by_pairs(itemsize):
    """Boxes of 128 bytes of the result's columns, and as many rows as columns."""
    columns, memory = 128 // itemsize, {}
    accumulator = wgmma_accumulator(columns)
    for thread in range(128):
        for block in range(columns // 8):
            for j in range(2):
                byte = transposed_pair_byte(thread, block, j, itemsize=itemsize)
                first = 4 * block + staggered_half(thread, j)
                for place, i in ((byte, first), (byte + itemsize, first + 2)):
                    row, col = accumulator(thread, i)
                    memory[place] = (col, paired_column(row))
    for box in range(64 // columns):
        for row in range(columns):
            for col in range(columns):
                chunk, rest = divmod(col * itemsize, 16)
                byte = (box * columns + row) * 128 + 16 * (chunk ^ (row % 8)) + rest
                assert memory.pop(byte) == (row, box * columns + col)
    assert not memory


@pytest.mark.parametrize("warp", WARPS)
def test_no_transposed_store_conflicts(warp):
    thread = LANE + 32 * warp
    for itemsize in (2, 4):
        for j in range(2):
            byte = transposed_pair_byte(thread, 0, j, itemsize=itemsize)
            assert simulate(byte, width=2 * itemsize).is_free
    rows_in_order = SWIZZLE_128B(LANE % 4 * 256 + LANE // 8 * 64 + LANE // 4 % 2 * 8)
    assert simulate(rows_in_order, width=8).worst == 2  # why halves are staggered


@pytest.mark.parametrize("warp", WARPS)
def test_no_store_conflicts(warp):
    thread = LANE + 32 * warp
    for block in range(0, 8, 2):
        assert simulate(stmatrix_x4_byte(thread, block), width=16).is_free
    for j in range(4):
        for half in range(2):
            assert simulate(accumulator_pair_byte(thread, j, half), width=8).is_free


def test_why_blocks_are_staggered_and_rows_swizzled():
    group, pair = LANE // 4, LANE % 4
    plain = SWIZZLE_128B(group * 128 + pair * 8)
    assert simulate(plain, width=8).degrees == (2, 2)
    assert simulate(LANE % 16 * 128 + LANE // 16 * 16, width=16).worst == 8


def test_stmatrix_stores_two_blocks_of_the_accumulator():
    accumulator = wgmma_accumulator(16)
    for lane, i in STMATRIX_X4.positions():
        assert STMATRIX_X4(lane, i) == accumulator(lane, i) == MMA_A(lane, i)


@pytest.mark.parametrize("lane", [0, 4, 31])
def test_every_lane_stores_every_block_once(lane):
    assert sorted(staggered_block(lane, j) for j in range(8)) == list(range(8))
