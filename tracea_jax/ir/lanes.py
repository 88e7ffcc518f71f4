"""Fragment maps: which element of a tile each register of each lane holds.

The C fragment of mma.m16n8k16, of which the others are built (g = lane div 4,
t = lane mod 4):

             cols 2t, 2t+1
    row g      c0  c1
    row g+8    c2  c3

The formulas take an integer lane or the expression ``LANE``; device code has the same
ones in kernels/cuda/tile/fragment.cuh. A ``Fragment`` proves on construction that it is
a bijection. (PTX ISA, "Matrix Fragments for mma.m16n8k16", "Register Fragments for
wgmma.mma_async.m64nNk16" and "... m64nNk8".)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from tracea_jax.ir.address import Index

WARP_LANES = 32
WARPGROUP_LANES = 128

Map = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A bijection (lane, register) -> (row, col) onto a tile.

    Attributes:
      name: the instruction and operand.
      rows, cols: shape of the tile; for a B operand rows are k and cols are n.
      lanes: threads that hold it together: 32 or 128.
      registers: elements held by each thread.
      row, col: the map, as functions of (lane, register).

    Raises:
      ValueError: two registers hold one element, or one holds none of the tile.
    """

    name: str
    rows: int
    cols: int
    lanes: int
    registers: int
    row: Map
    col: Map

    def __post_init__(self) -> None:
        holder: dict[tuple[int, int], tuple[int, int]] = {}
        for lane, i in self.positions():
            row, col = self(lane, i)
            if not (0 <= row < self.rows and 0 <= col < self.cols):
                raise ValueError(
                    f"{self.name}: register {i} of lane {lane} is element {row, col}, "
                    f"outside of {self.rows} x {self.cols}"
                )
            if (row, col) in holder:
                raise ValueError(
                    f"{self.name}: element {row, col} is held by (lane, register) "
                    f"{holder[row, col]} and {lane, i}"
                )
            holder[row, col] = lane, i
        if len(holder) != self.rows * self.cols:
            raise ValueError(
                f"{self.name}: {len(holder)} registers for {self.rows} x {self.cols} "
                "elements"
            )

    def __call__(self, lane: int, i: int) -> tuple[int, int]:
        return self.row(lane, i), self.col(lane, i)

    def positions(self) -> itertools.product[tuple[int, int]]:
        """Every (lane, register)."""
        return itertools.product(range(self.lanes), range(self.registers))


def mma_a_row(lane: Index, i: int) -> Index:
    return lane // 4 + 8 * (i // 2 % 2)


def mma_a_col(lane: Index, i: int) -> Index:
    return lane % 4 * 2 + (i % 2 + 8 * (i // 4))


def mma_b_row(lane: Index, i: int) -> Index:
    return lane % 4 * 2 + (i % 2 + 8 * (i // 2))


def mma_b_col(lane: Index, i: int) -> Index:
    return lane // 4


def mma_c_row(lane: Index, i: int) -> Index:
    return lane // 4 + 8 * (i // 2)


def mma_c_col(lane: Index, i: int) -> Index:
    return lane % 4 * 2 + i % 2


def wgmma_tf32_a_row(thread: Index, i: int) -> Index:
    """Row in 0 .. 63 of a fragment of 64 rows x 8 k."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)


def wgmma_tf32_a_col(thread: Index, i: int) -> Index:
    return thread % 4 + 4 * (i // 2)


def wgmma_accumulator_row(thread: Index, i: int) -> Index:
    """Row in 0 .. 63: the warp's 16 rows, then as the C fragment."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)


def wgmma_accumulator_col(thread: Index, i: int) -> Index:
    """Column: block i div 4 of 8 columns, then as the C fragment."""
    return thread % 4 * 2 + (i % 2 + 8 * (i // 4))


MMA_A = Fragment(
    name="mma.m16n8k16 A",
    rows=16,
    cols=16,
    lanes=WARP_LANES,
    registers=8,
    row=mma_a_row,
    col=mma_a_col,
)
WGMMA_TF32_A = Fragment(
    name="wgmma.m64nNk8 TF32 A",
    rows=64,
    cols=8,
    lanes=WARPGROUP_LANES,
    registers=4,
    row=wgmma_tf32_a_row,
    col=wgmma_tf32_a_col,
)
MMA_B = Fragment(
    name="mma.m16n8k16 B",
    rows=16,
    cols=8,
    lanes=WARP_LANES,
    registers=4,
    row=mma_b_row,
    col=mma_b_col,
)
MMA_C = Fragment(
    name="mma.m16n8k16 C",
    rows=16,
    cols=8,
    lanes=WARP_LANES,
    registers=4,
    row=mma_c_row,
    col=mma_c_col,
)


@functools.cache
def wgmma_accumulator(n: int) -> Fragment:
    """The accumulator of wgmma.m64nNk16, n / 2 registers in each of 128 threads.

    Raises:
      ValueError: ``n`` is not a multiple of 8 in 8 .. 256.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma {n=} must be a multiple of 8 in 8 .. 256")
    return Fragment(
        name=f"wgmma.m64n{n}k16 accumulator",
        rows=64,
        cols=n,
        lanes=WARPGROUP_LANES,
        registers=n // 2,
        row=wgmma_accumulator_row,
        col=wgmma_accumulator_col,
    )
