"""What the kernels of convolutions for Hopper share: results, and their epilogue.

See kernels/cuda/tile/conv_epilogue.cuh.
"""

from __future__ import annotations

from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit.kernel import Im2colMap, TensorMap, TensorMapSwizzle
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Epilogue

_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
_SLAB, _ROW_BYTES = 64, 128  # of a sub-tile


def conv_result_map(
    operand: int, dtype: str, channels: int, pixels: int, lines: int, images: int
) -> TensorMap:
    """A result, or a residual, in boxes of 64 pixels of a line by 128 bytes."""
    row = channels * ITEMSIZE[dtype]
    return TensorMap(
        operand=operand,
        dtype=dtype,
        dims=(channels, pixels, lines, images),
        strides=(row, row * pixels, row * pixels * lines),
        box=(_ROW_BYTES // ITEMSIZE[dtype], _SLAB, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def conv_walked_map(
    operand: int,
    dtype: str,
    dims: tuple[int, int, int, int],
    counted: tuple[int, int],
) -> Im2colMap:
    """The same, in copies of 64 pixels that are counted through a larger image.

    Args:
      operand, dtype: of the map.
      dims: channels, columns, rows and images.
      counted: columns and rows of an image as pixels are counted.
    """
    channels, columns, rows, _ = dims
    row = channels * ITEMSIZE[dtype]
    return Im2colMap(
        operand=operand,
        dtype=dtype,
        dims=dims,
        strides=(row, row * columns, row * columns * rows),
        lower=(0, 0),
        upper=(counted[0] - columns, counted[1] - rows),
        channels=_ROW_BYTES // ITEMSIZE[dtype],
        pixels=_SLAB,
        element_strides=(1, 1, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def finish_arguments(
    epilogue: Epilogue, *, is_scattered: bool = False
) -> tuple[list[str], str]:
    """Parameters of an entry, and the ``ConvEpilogueParams`` made of them.

    The entry also has "n", and "rows" and "columns" of an image of the result.
    """
    saves, joins = epilogue.save_preactivation, epilogue.residual
    has_bias = epilogues.has_bias(epilogue)
    parameters = ["void* out" if is_scattered else f"{_MAP} out"]
    parameters += ["void* z" if is_scattered else f"{_MAP} z"] * saves
    parameters += ["const void* bias"] * has_bias
    parameters += [f"{_MAP} residual"] * joins
    fields = (
        "nullptr" if is_scattered else "&out",
        "&z" if saves and not is_scattered else "nullptr",
        "&residual" if joins else "nullptr",
        "bias" if has_bias else "nullptr",
        f"{{out, {'z' if saves else 'nullptr'}}}" if is_scattered else "{}",
        *("n", "rows", "columns"),
    )
    return parameters, f"{{{', '.join(fields)}}}"
