"""Results and epilogues that the convolution kernels for Hopper share.

See kernels/cuda/tile/conv_epilogue.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit.kernel import (
    Im2colMap,
    Param,
    Pointer,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem, Epilogue

MAP_TYPE = "const __grid_constant__ tracea::TensorMap"  # of a parameter
WARPGROUP = 128
SLAB, ROW_BYTES = 64, 128  # rows of one wgmma, and bytes of a row of a sub-tile
_RESIDUAL_BUFFERS = 2  # of each consumer


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
        box=(ROW_BYTES // ITEMSIZE[dtype], SLAB, 1, 1),
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
        channels=ROW_BYTES // ITEMSIZE[dtype],
        pixels=SLAB,
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
    type_out = "void*" if is_scattered else MAP_TYPE
    parameters = [f"{type_out} out", *[f"{type_out} z"] * saves]
    parameters += ["const void* bias"] * has_bias
    parameters += [f"{MAP_TYPE} residual"] * joins
    fields = (
        "nullptr" if is_scattered else "&out",
        "&z" if saves and not is_scattered else "nullptr",
        "&residual" if joins else "nullptr",
        "bias" if has_bias else "nullptr",
        f"{{out, {'z' if saves else 'nullptr'}}}" if is_scattered else "{}",
        *("n", "rows", "columns"),
    )
    return parameters, f"{{{', '.join(fields)}}}"


def finish_params(
    problem: Conv2dProblem,
    finished: Callable[[int, str], Param],
    *,
    is_scattered: bool = False,
) -> list[Param]:
    """The arguments for those parameters.

    Args:
      problem: its operands are lhs, rhs, then bias and residual if there are; the
        results are the output, then the preactivation if it is saved.
      finished: the map of a result or a residual, by its operand and dtype.
      is_scattered: whether results are addresses.
    """
    epilogue = problem.epilogue
    residual = 2 + epilogues.has_bias(epilogue)
    out = residual + epilogue.residual
    results = range(out, out + 1 + epilogue.save_preactivation)
    params: list[Param] = [
        Pointer(operand=i) if is_scattered else finished(i, problem.out)
        for i in results
    ]
    params += [Pointer(operand=2)] * epilogues.has_bias(epilogue)
    if epilogue.residual:
        params.append(finished(residual, epilogue.residual_dtype or problem.out))
    return params


def consumer_bytes(problem: Conv2dProblem, tile_n: Any, buffers: int) -> Any:
    """Shared memory of a consumer: staging buffers, its bias, and its barriers."""
    staged = _all_buffers(problem, buffers) * SLAB * ROW_BYTES
    return staged + 4 * tile_n + 8 * (_RESIDUAL_BUFFERS + 1)


def epilogue_buffers(
    problem: Conv2dProblem, config: Any, smem_bytes: Callable[..., Any], limit: int
) -> int:
    """Staging buffers of each consumer: at most one for every store, at least two.

    Args:
      problem: what is computed.
      config: with the ``slabs`` of a consumer and their ``tile_n`` channels.
      smem_bytes: of a block, by problem, config and such a count.
      limit: bytes that a block may have.
    """
    stores = config.slabs * -(-config.tile_n // (ROW_BYTES // ITEMSIZE[problem.out]))
    stores *= 1 + problem.epilogue.save_preactivation
    fitting = (
        count
        for count in range(max(stores, 2), 2, -1)
        if smem_bytes(problem, config, count) <= limit
    )
    return next(fitting, 2)


def finish_traits(problem: Conv2dProblem, buffers: int, smem_bytes: Any) -> str:
    """The members of Traits that the epilogue and the size of a block ask for."""
    return f"""\
  static constexpr int kEpilogueBuffers = {buffers}, \
kBuffers = {_all_buffers(problem, buffers)}, kSmemBytes = {int(smem_bytes)};
{epilogues.convolution_traits(problem)}"""


def _all_buffers(problem: Conv2dProblem, buffers: int) -> int:
    return buffers + _RESIDUAL_BUFFERS * problem.epilogue.residual
