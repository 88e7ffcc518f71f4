"""Reads of mma.sync operands by a warp from swizzled tiles in shared memory.

A tile is stored in rows without padding: one for each m or n and along k ("k-major"),
or one for each k and along m or n ("mn-major"). A warp reads it in blocks of 16 of m or
n by one step, 32 bytes of k: 16 elements of 16 bits (mma.m16n8k16) or 8 of f32
(m16n8k8, TF32). Four words of each lane hold a block, the halves they come from being

           A                    B (two fragments of 8 columns)
    r0   m 0-7   first k      n 0-7   first k
    r1   m 8-15  first k      n 0-7   second k
    r2   m 0-7   second k     n 8-15  first k
    r3   m 8-15  second k     n 8-15  second k

Device code has the same formulas in kernels/cuda/tile/operand_map.cuh. (PTX ISA,
"ldmatrix", "Matrix Fragments for mma.m16n8k8" and "... m16n8k16".)
"""

from __future__ import annotations

import dataclasses

from tracea_jax.ir.address import Index
from tracea_jax.ir.lanes import WARP_LANES, Fragment
from tracea_jax.ir.swizzle import Swizzle, conflict_free_swizzle

BLOCK = 16  # of m or n
STEP_BYTES = 32  # of k

MMA_TF32_A = Fragment(
    name="mma.m16n8k8 TF32 A",
    rows=16,
    cols=8,
    lanes=WARP_LANES,
    registers=4,
    row=lambda lane, i: lane // 4 + 8 * (i % 2),
    col=lambda lane, i: lane % 4 + 4 * (i // 2),
)
MMA_TF32_B = Fragment(
    name="mma.m16n8k8 TF32 B",
    rows=8,
    cols=8,
    lanes=WARP_LANES,
    registers=2,
    row=lambda lane, i: lane % 4 + 4 * i,
    col=lambda lane, i: lane // 4,
)


def ldmatrix_row(lane: Index, *, crossed: bool) -> Index:
    """Row of the block that a lane points ldmatrix.x4 at, of 16.

    Straight, matrices 0 and 1 lie below each other; crossed, beside each other.
    """
    return lane % 8 + lane // 16 * 8 if crossed else lane % 16


def ldmatrix_chunk(lane: Index, *, crossed: bool) -> Index:
    """Which of the block's two chunks of 16 bytes it points at."""
    return lane // 8 % 2 if crossed else lane // 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandReads:
    """Reads of one operand's tiles by a warp.

    Attributes:
      is_a: whether it is the left operand.
      mn_major: how the tile is stored.
      row_bytes: of the tile.
      itemsize: bytes of an element, 2 or 4.
      blocks: that each warp reads, side by side along m or n; a power of two.
    """

    is_a: bool
    mn_major: bool
    row_bytes: int
    itemsize: int
    blocks: int

    @property
    def swizzle(self) -> Swizzle:
        return operand_swizzle(self.row_bytes, self.itemsize, mn_major=self.mn_major)

    @property
    def by_words(self) -> bool:
        """True if lanes load single words: ldmatrix transposes nothing but 16 bits."""
        return self.mn_major and self.itemsize == 4

    @property
    def words(self) -> int:
        """Loads of one block: a word each, or one ldmatrix.x4."""
        return 4 if self.by_words else 1

    @property
    def step(self) -> int:
        """Elements of k of one step."""
        return STEP_BYTES // self.itemsize

    def place(
        self, warp: int, lane: Index, block: int, step: int, word: int = 0
    ) -> tuple[Index, Index]:
        """(row, byte in the row) of the tile that a lane reads from, unswizzled."""
        first = (warp * self.blocks + block) * BLOCK  # of m or n
        if self.by_words:
            mn_half, k_half = (word % 2, word // 2) if self.is_a else divmod(word, 2)
            mn = lane // 4 + (first + 8 * mn_half)
            return lane % 4 + (step * self.step + 4 * k_half), mn * self.itemsize
        crossed = self.is_a == self.mn_major
        row = ldmatrix_row(lane, crossed=crossed)
        byte = ldmatrix_chunk(lane, crossed=crossed) * 16
        if self.mn_major:
            return row + step * self.step, byte + first * self.itemsize
        return row + first, byte + step * STEP_BYTES

    def byte(
        self, warp: int, lane: Index, block: int, step: int, word: int = 0
    ) -> Index:
        """The swizzled byte, from the start of the tile, that a lane reads from."""
        row, byte = self.place(warp, lane, block, step, word)
        return self.swizzle(row * self.row_bytes + byte)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileCopies:
    """Division of the copy of a tile, in units along its rows, among threads.

    Unit u = thread + i threads is unit u mod (row_bytes / unit_bytes) of its row.

    Attributes:
      rows, row_bytes: of the tile.
      unit_bytes: 4, 8 or 16.
      threads: a power of two.
      swizzle: of the tile.
    """

    rows: int
    row_bytes: int
    unit_bytes: int
    threads: int
    swizzle: Swizzle

    @property
    def units(self) -> int:
        """Copies of each thread."""
        return self.rows * self.row_bytes // (self.unit_bytes * self.threads)

    def place(self, thread: int, i: int) -> tuple[int, int]:
        """(row, byte in the row) of a thread's unit i, unswizzled."""
        unit = thread + i * self.threads
        row, column = divmod(unit, self.row_bytes // self.unit_bytes)
        return row, column * self.unit_bytes

    def byte(self, thread: Index, i: int) -> Index:
        """The swizzled byte, from the start of the tile, where the unit goes."""
        return self.swizzle((thread + i * self.threads) * self.unit_bytes)


def operand_swizzle(row_bytes: int, itemsize: int, *, mn_major: bool) -> Swizzle:
    """The swizzle under which copies and reads of a tile are free of bank conflicts.

    Reads by ldmatrix touch a column of 16-byte chunks in eight rows. Single words of
    f32 are read from four rows of k, eight along m or n of each: there the low two bits
    of the row go to the chunks of 32 bytes.
    """
    if mn_major and itemsize == 4:
        return Swizzle(bits=2, base=5, shift=row_bytes.bit_length() - 1 - 5)
    return conflict_free_swizzle(row_bytes)
