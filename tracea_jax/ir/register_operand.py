"""TF32 fragments that a warpgroup reads from an m-major tile, for wgmma's left operand.

A tile of a stage is stored in slabs of 32 columns (of m): a row of 128 swizzled bytes
for each of 32 k. A thread reads four words for 64 columns and 8 k (g = lane div 4,
t = lane mod 4, warp w):

             k t    k t+4
    row g     a0     a2       of the rows 16w .. 16w+15 of the fragment
    row g+8   a1     a3

Rows of the fragment are columns of the tile as they come, or *paired*: a product that
is stored transposed may have any permutation of columns as its rows, if the store knows
it. The one here makes two rows of a thread neighbours, read by one load, and free of
bank conflicts. Device code has the same formulas in kernels/cuda/tile/fragment.cuh and
register_operand_map.cuh. (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk8".)
"""

from __future__ import annotations

from tracea_jax.ir.address import Index
from tracea_jax.ir.lanes import wgmma_tf32_a_col, wgmma_tf32_a_row
from tracea_jax.ir.swizzle import SWIZZLE_128B

COLUMNS = 32  # of a slab in memory; also its rows
ROW_BYTES = 128
SLAB_BYTES = COLUMNS * ROW_BYTES
STEP = 8  # of k


def paired_column(row: Index) -> Index:
    """The column of 0 .. 63 that becomes this row: its number's bits, permuted.

    Rows g and g + 8 of a warp are columns 2j and 2j + 1. Rows 0 .. 3 of eight lie in
    two 16-byte chunks that are four chunks apart, and so do rows 4 .. 7.
    """
    return (
        (row & 32)
        + ((row & 2) << 3)
        + ((row & 16) >> 1)
        + (row & 4)
        + ((row & 1) << 1)
        + ((row & 8) >> 3)
    )


def fragment_byte(
    thread: Index, slab: int, step: int, i: int, *, paired: bool
) -> Index:
    """Offset of register i of a thread, from the start of the tile.

    Args:
      slab: which 64 columns of the tile.
      step: which 8 of the stage's 32 k.
    """
    row = wgmma_tf32_a_row(thread, i)
    column = paired_column(row) if paired else row
    k = wgmma_tf32_a_col(thread, i) + STEP * step
    in_slab = SWIZZLE_128B(k * ROW_BYTES + column % COLUMNS * 4)
    return column // COLUMNS * SLAB_BYTES + in_slab + 2 * SLAB_BYTES * slab
