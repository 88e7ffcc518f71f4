"""Staging of a wgmma accumulator in swizzled shared memory, for its TMA store.

The accumulator leaves in sub-tiles of 64 rows x 128 bytes, each one box of the output's
tensor map: 64 columns of 16 bits or 32 of f32. 16-bit results are packed in pairs and
stored by stmatrix.x4, one block of 16 x 16 for each warp at a time; f32 results are
stored two registers (8 bytes) at a time. Bytes count from the start of the sub-tile,
which is aligned to ``SWIZZLE_128B.period_bytes``.

The accumulator of a transposed product leaves in sub-tiles of its 64 rows, which are
paired columns of the result, by 128 bytes of its columns: one box of 64 x 64 16-bit
elements, or two of 32 x 32 f32. Registers c0, c2 and c1, c3 of a block are neighbours
there, and stored in pairs.

Device code has the same formulas in kernels/cuda/tile/fragment.cuh. (PTX ISA,
"stmatrix".)
"""

from __future__ import annotations

from tracea_jax.ir.address import Index
from tracea_jax.ir.lanes import (
    WARP_LANES,
    Fragment,
    wgmma_accumulator_col,
    wgmma_accumulator_row,
)
from tracea_jax.ir.register_operand import paired_column
from tracea_jax.ir.swizzle import SWIZZLE_128B

ROWS = 64
ROW_BYTES = 128


def stmatrix_x4_row(lane: Index) -> Index:
    """Row, in a 16 x 16 block, of the 16 bytes that the lane points at."""
    return lane % 16


def stmatrix_x4_col(lane: Index) -> Index:
    """First column, in a 16 x 16 block, of the 16 bytes that the lane points at."""
    return lane // 16 * 8


def stmatrix_x4_stored(lane: int, i: int) -> tuple[int, int]:
    """Place at which stmatrix.x4 stores element i of a lane, in a block of 16 x 16.

    Elements 2p and 2p + 1 are packed into register p, which is 8x8 matrix p. The
    instruction stores those of lane L as columns 2 (L mod 4) and the next one of the
    row at the address supplied by lane 8 p + L div 4. The matrices are in the order

                 cols 0-7   cols 8-15
        rows 0-7    p0         p2
        rows 8-15   p1         p3
    """
    source = 8 * (i // 2) + lane // 4
    return stmatrix_x4_row(source), stmatrix_x4_col(source) + 2 * (lane % 4) + i % 2


STMATRIX_X4 = Fragment(
    name="stmatrix.x4",
    rows=16,
    cols=16,
    lanes=WARP_LANES,
    registers=8,
    row=lambda lane, i: stmatrix_x4_stored(lane, i)[0],
    col=lambda lane, i: stmatrix_x4_stored(lane, i)[1],
)


def staggered_block(lane: Index, j: int) -> Index:
    """The 8-column block that a lane stores in step j: odd rows swap 0, 1 with 2, 3.

    A plain 8-byte store of an f32 accumulator into 128-byte swizzled rows is a two-way
    conflict: rows g and g ^ 1 of one phase swap the same two 16-byte chunks.
    """
    return (lane // 4 % 2 * 2) ^ j


def stmatrix_x4_byte(thread: Index, block: int) -> Index:
    """The byte that a thread of the warpgroup supplies to stmatrix.x4.

    Stores 16-bit columns 8 block .. 8 block + 15 of the sub-tile, ``block`` even:
    registers 4 block .. 4 block + 7, packed in pairs.
    """
    lane = thread % WARP_LANES
    row = thread // WARP_LANES * 16 + stmatrix_x4_row(lane)
    return SWIZZLE_128B(row * ROW_BYTES + (stmatrix_x4_col(lane) + 8 * block) * 2)


def accumulator_pair_byte(thread: Index, j: int, half: int) -> Index:
    """The byte where a thread stores two neighbouring f32 registers in step j.

    They are registers 4 b + 2 half and 4 b + 2 half + 1 of the sub-tile's block b,
    b = ``staggered_block(thread, j)``.
    """
    row = wgmma_accumulator_row(thread, 2 * half)
    col = staggered_block(thread, j) * 8 + wgmma_accumulator_col(thread, 0)
    return SWIZZLE_128B(row * ROW_BYTES + col * 4)


def staggered_half(thread: Index, j: int) -> Index:
    """The half, of the registers {0, 2} and {1, 3} of a block, to store in step j.

    Threads of the same columns hold rows 2t + half of the result. In plain order two of
    the four would meet in the same banks.
    """
    return ((thread ^ (thread // 2)) & 1) ^ j


def transposed_pair_byte(thread: Index, block: int, j: int, *, itemsize: int) -> Index:
    """Byte of a thread's pair of an 8-column block of the accumulator in step j.

    They are registers 4 block + half and 4 block + half + 2, neighbours in a row of the
    result, half = ``staggered_half(thread, j)``. Bytes count from the first box.
    """
    columns = ROW_BYTES // itemsize  # of a box, and its rows
    row = thread % 4 * 2 + staggered_half(thread, j) + 8 * block
    col = paired_column(wgmma_accumulator_row(thread, 0))
    in_box = SWIZZLE_128B(row * ROW_BYTES + col % columns * itemsize)
    return col // columns * (columns * ROW_BYTES) + in_box
