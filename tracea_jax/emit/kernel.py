"""The description of one CUDA kernel launch: text to compile, and how to launch it.

Nothing here depends on an op: a variant fills in a ``Kernel``, ``runtime.nvrtc``
compiles it and ``runtime.launch`` encodes its launch. Operands are numbered arguments
first, then results.
"""

from __future__ import annotations

import dataclasses
import enum

MOST_BLOCKS_Y = 65535  # in y and in z of a grid; CUDA allows 2^31 - 1 in x
MOST_BYTES = 2**40 - 16  # strides of tensor maps, and so arrays, are at most as large


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
class Im2colMap:
    """A TMA descriptor over the images of a convolution, encoded at launch.

    One copy moves some channels of consecutive pixels. Pixels are counted through a box
    of positions in one image, the innermost spatial dimension first, and then through
    the box of the next image; the copy instruction adds the offset of a filter tap.
    What lies outside of an image is read as zero. See cuTensorMapEncodeIm2col of the
    CUDA driver API.

    Attributes:
      operand, dtype, strides, swizzle: as in ``TensorMap``.
      dims: channels, one to three spatial extents, innermost first, and images.
      lower, upper: corners of the box, in pixels from the first pixel of an image and
        from its last, for each spatial dimension, innermost first.
      channels: of each pixel that one copy moves, at most 256.
      pixels: that one copy moves, at most 1024.
      element_strides: steps between positions, 1 to 8, for each of ``dims``; that of
        the channels is ignored.
    """

    operand: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...]
    swizzle: TensorMapSwizzle

    def __post_init__(self) -> None:
        rank = len(self.dims)
        for name, count in (
            ("strides", rank - 1),
            ("lower", rank - 2),
            ("upper", rank - 2),
            ("element_strides", rank),
        ):
            if len(value := getattr(self, name)) != count:
                raise ValueError(
                    f"{name}={value} must have {count} entries, as {rank} dims need"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The device address of an operand; operand -1 is a null pointer."""

    operand: int


# Types of kernel parameters that are passed by value, by name.
SCALAR_BITS = {
    **{f"{sign}int{bits}": bits for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **{"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A number passed by value.

    Attributes:
      value: an integer in the range of the type, or any number for a floating type.
      dtype: its type by name, one of ``SCALAR_BITS``.

    Raises:
      ValueError: on an unknown type, or a value that it does not have.
    """

    value: int | float
    dtype: str = "int32"

    def __post_init__(self) -> None:
        if self.dtype not in SCALAR_BITS:
            raise ValueError(
                f"kernel parameters have no type {self.dtype!r}; "
                f"they have {', '.join(SCALAR_BITS)}"
            )
        if (limits := _limits(self.dtype)) is None:
            return
        low, high = limits
        if not (isinstance(self.value, int) and low <= self.value <= high):
            raise ValueError(
                f"value={self.value!r} must be an integer from {low} to {high}, as "
                f"{self.dtype} has them"
            )


def _limits(dtype: str) -> tuple[int, int] | None:
    """The least and the largest integer of a type; None of a floating one."""
    bits = SCALAR_BITS[dtype]
    if dtype.startswith("u"):
        return 0, 2**bits - 1
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if "int" in dtype else None


Param = TensorMap | Im2colMap | Pointer | Scalar


def operand_of(param: Param) -> int:
    """The operand that a parameter refers to; -1 if it refers to none."""
    return -1 if isinstance(param, Scalar) else param.operand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: its translation unit and one launch of it.

    The source, headers, options and arch determine the cubin; everything below them
    only determines the launch, so problems that share a cubin differ only there.

    Attributes:
      entry: name of the extern "C" entry point, or a C++ expression that names another
        one, such as "softmax<float, 128>" or "::softmax".
      source: the generated translation unit.
      headers: (name, text) of every header that the source may include.
      arch: exact target such as "sm_90a".
      options: further compiler options.
      grid, block, cluster: launch shape in blocks, threads and blocks.
      smem_bytes: dynamic shared memory.
      params: kernel parameters in order.
      place: file and line where the source begins, as errors of the compiler name it;
        None of a generated source.
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
    place: tuple[str, int] | None = None
