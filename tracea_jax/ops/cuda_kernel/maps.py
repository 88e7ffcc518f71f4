"""Tensor maps of users: TMA descriptors over the arrays of a kernel.

What the driver gets is ``emit.kernel.TensorMap``, innermost dimension first; users give
boxes in the order of an array's own dimensions. Caller: ``launcher``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.emit.kernel import TensorMap as Descriptor
from tracea_jax.emit.kernel import TensorMapSwizzle
from tracea_jax.mistakes import check_kind, whole

_SWIZZLES = {
    0: TensorMapSwizzle.NONE,
    32: TensorMapSwizzle.B32,
    64: TensorMapSwizzle.B64,
    128: TensorMapSwizzle.B128,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A TMA descriptor that a kernel takes as a ``__grid_constant__`` of 128 bytes.

    The array is row-major, as all arrays of a kernel are. What a box has outside of it
    is read as zero and not written.

    Attributes:
      box: elements that one copy moves, in the order of the array's dimensions; its
        last one times the size of an element is a multiple of 16 bytes.
      of: the kernel's parameter for the array; None if the map is all that the kernel
        gets of it.
      swizzle: bytes of the shared-memory pattern, 0, 32, 64 or 128.

    Raises:
      ValueError: on another swizzle, or a box without a size.
      TypeError: on an argument of another type.
    """

    box: tuple[int, ...]
    of: str | None = None
    swizzle: int = 0

    def __post_init__(self) -> None:
        check_kind("box", self.box, tuple | list, "a tuple of integers")
        check_kind("of", self.of, str | None, "a parameter's name or None")
        box = tuple(whole("box", size) for size in self.box)
        if not box or min(box) < 1:
            raise ValueError(f"box={self.box} must have sizes of at least 1")
        object.__setattr__(self, "box", box)
        if whole("swizzle", self.swizzle) not in _SWIZZLES:
            raise ValueError(f"swizzle={self.swizzle} must be 0, 32, 64 or 128 bytes")

    def param(self, array: Any, operand: int) -> Descriptor:
        """The descriptor over an array in a numbered buffer.

        Raises:
          ValueError: if the box has another number of dimensions than the array.
        """
        shape = tuple(array.shape)
        if len(shape) != len(self.box):
            raise ValueError(
                f"box={self.box} must have {len(shape)} sizes, as {list(shape)} has"
            )
        bytes_each = array.dtype.itemsize
        strides = [math.prod(shape[i:]) * bytes_each for i in range(1, len(shape))]
        return Descriptor(
            operand=operand,
            dtype=array.dtype.name,
            dims=shape[::-1],
            strides=tuple(strides[::-1]),
            box=self.box[::-1],
            swizzle=_SWIZZLES[self.swizzle],
        )
