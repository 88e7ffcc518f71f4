"""The description of one CUDA kernel launch: text to compile, and how to launch it.

Nothing here depends on an op: a variant fills in a ``Kernel`` and the runtime compiles
and launches it. Operands are numbered arguments first, then results.
"""

from __future__ import annotations

import dataclasses
import enum


class TensorMapSwizzle(enum.IntEnum):
    """Shared-memory swizzle modes of a tensor map, by ``CUtensorMapSwizzle`` value."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A tiled TMA descriptor over an operand, encoded at launch for its address.

    Attributes:
      operand: index of the buffer.
      dtype: element type by name.
      dims: sizes in elements, innermost first.
      strides: bytes between consecutive indices of dims[1:] (multiples of 16).
      box: elements of each dimension that one copy moves.
      swizzle: shared-memory pattern of the copy.
    """

    operand: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: TensorMapSwizzle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The device address of an operand; operand -1 is a null pointer."""

    operand: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """An integer passed by value, 32 or 64 bits wide."""

    value: int
    bits: int = 32


Param = TensorMap | Pointer | Scalar


def operand_of(param: Param) -> int:
    """The operand that a parameter refers to; -1 if it refers to none."""
    return -1 if isinstance(param, Scalar) else param.operand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: its translation unit and one launch of it.

    The source, headers, options and arch determine the cubin; everything below them
    only determines the launch, so problems that share a cubin differ only there.

    Attributes:
      entry: name of the extern "C" entry point.
      source: the generated translation unit.
      headers: (name, text) of every header that the source may include.
      arch: exact target such as "sm_90a".
      options: further compiler options.
      grid, block, cluster: launch shape in blocks, threads and blocks.
      smem_bytes: dynamic shared memory.
      params: kernel parameters in order.
    """

    entry: str
    source: str
    headers: tuple[tuple[str, str], ...]
    arch: str
    options: tuple[str, ...] = ()
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem_bytes: int
    params: tuple[Param, ...]
