"""Arrays of a compiled graph, and where they lie in memory.

A ``Room`` is memory that something is written to once: an input, an output, a constant,
or a part of the workspace. A ``View`` is an array in a room; reshaping makes another
view of the same room. ``placed`` gives the rooms of the workspace their offsets, so
that rooms which are never needed at the same time share bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

ALIGNMENT = 256  # of everything, in bytes: of what cudaMalloc returns

Storage = Literal["input", "output", "constants", "workspace"]

# What the library has names for (tracea.h).
DTYPES = (
    *("float32", "bfloat16", "float16", "float64"),
    *("complex64", "complex128", "bool", "int32"),
)


@dataclasses.dataclass(slots=True, eq=False)
class Room:
    """Some bytes.

    Attributes:
      storage: what they are part of. A room of the workspace becomes one of an output
        when it turns out to be the result.
      bytes: how many.
      index: of the input or the output.
      offset: in the constants or in the workspace; known at the end.
      data: of a constant.
    """

    storage: Storage
    bytes: int
    index: int = 0
    offset: int = 0
    data: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """A contiguous array in a room, which it fills."""

    room: Room
    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As the manifest has it."""
        room = self.room
        return {
            "storage": room.storage,
            "index": room.index,
            "offset": room.offset,
            "dtype": self.dtype,
            "shape": list(self.shape),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """An array whose elements another one has, each ``inner`` times in a row.

    Element i of it is element ``(i // inner) % size`` of the other one. What functions
    of each element read needs not be in memory.
    """

    view: View
    inner: int
    shape: tuple[int, ...]


def inner_of(
    shape: Sequence[int], axes: Sequence[int], out: Sequence[int]
) -> int | None:
    """Repetitions of each element in a row; see ``Spread``.

    Args:
      shape: of the smaller array.
      axes: its dimensions among those of the larger one.
      out: shape of that one.

    Returns:
      None if it is repeated between dimensions that stay, too.
    """
    kept = [axis for axis, size in zip(axes, shape, strict=True) if size > 1]
    if not kept:
        return 1
    if math.prod(out[kept[0] : kept[-1] + 1]) != math.prod(shape):
        return None
    return math.prod(out[kept[-1] + 1 :])


def size_bytes(dtype: Any, shape: Sequence[int]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def rounded(size: int) -> int:
    """Up to what the next array may begin at."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def placed(rooms: Sequence[Room], lives: Sequence[tuple[int, int]]) -> int:
    """Gives rooms of the workspace their offsets; returns the bytes of all.

    Larger rooms come first, each at the lowest place where nothing lies that lives at
    the same time.

    Args:
      rooms: of the workspace.
      lives: of each the first and the last step that use it.
    """
    order = sorted(range(len(rooms)), key=lambda i: -rooms[i].bytes)
    done: list[int] = []
    for i in order:
        first, last = lives[i]
        near = [j for j in done if lives[j][0] <= last and first <= lives[j][1]]
        room, offset = rooms[i], 0
        for j in sorted(near, key=lambda j: rooms[j].offset):
            other = rooms[j]
            if offset + room.bytes <= other.offset:
                break
            offset = max(offset, rounded(other.offset + other.bytes))
        room.offset = offset
        done.append(i)
    return max((rounded(room.offset + room.bytes) for room in rooms), default=0)
