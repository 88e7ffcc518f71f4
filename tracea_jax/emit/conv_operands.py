"""Operands of convolutions for Hopper: chunks of channels, and weights in rows.

The tensor cores read 16-bit weights as they are stored. Those of float32, which they
multiply as TF32, must lie along the channels that are summed: (R, S, I, O) does for the
gradient of the input, and the forward convolution takes (R, S, O, I). Callers:
``emit.conv2d_sm90`` and ``emit.conv2d_strips_sm90``.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.emit.conv_axes import source_channels
from tracea_jax.emit.conv_results import ROW_BYTES, SLAB
from tracea_jax.emit.kernel import TensorMap, TensorMapSwizzle
from tracea_jax.emit.wgmma import STEP_BYTES, Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

DTYPES_16 = ("bfloat16", "float16")
DTYPES = (*DTYPES_16, "float32")


def multiplied(dtype: str) -> str:
    """The dtype that the tensor cores multiply; copies of float32 round to it."""
    return "tfloat32" if dtype == "float32" else dtype


def wgmma(problem: Conv2dProblem, tile_n: int) -> Wgmma:
    """The instruction that multiplies pixels by weights."""
    dtype = multiplied(problem.lhs)
    return Wgmma(n=tile_n, lhs=dtype, rhs=dtype)


def channels_out(problem: Conv2dProblem) -> int:
    """Channels of the result, along n."""
    is_gradient = problem.direction == "input_grad"
    return problem.in_channels if is_gradient else problem.out_channels


def chunk(problem: Conv2dProblem) -> int:
    """Channels of one stage: the width whose multiples exceed the channels least."""
    depth, itemsize = source_channels(problem), ITEMSIZE[problem.lhs]
    widths = range(ROW_BYTES // itemsize, 0, -(STEP_BYTES // itemsize))
    return min(widths, key=lambda width: (-(-depth // width) * width, -width))


def transposes_weights(problem: Conv2dProblem) -> bool:
    """Returns whether the kernel reads weights as (R, S, O, I)."""
    return problem.direction == "forward" and problem.lhs == "float32"


def along_k(problem: Conv2dProblem) -> bool:
    """Returns whether rows of the weights that the kernel reads are summed over."""
    return problem.direction == "input_grad" or transposes_weights(problem)


def rows_b(problem: Conv2dProblem, tile_n: Any) -> Any:
    """Rows of 128 bytes of a stage's weights."""
    if along_k(problem):
        return tile_n
    return -(-tile_n // SLAB) * chunk(problem)


def weights_map(problem: Conv2dProblem, tile_n: int, cluster: int = 1) -> TensorMap:
    """Weights as (taps, rows, columns): boxes that leave a tap meet zeros.

    Args:
      problem: whose weights they are.
      tile_n: channels of a tile.
      cluster: blocks that copy a part each.
    """
    rows, columns = problem.in_channels, problem.out_channels
    if transposes_weights(problem):
        rows, columns = columns, rows
    taps = problem.kernel_height * problem.kernel_width
    row = columns * ITEMSIZE[problem.rhs]
    wide = chunk(problem)
    rows_along_k, rows_along_n = (wide, tile_n // cluster), (SLAB, wide // cluster)
    return TensorMap(
        operand=1,
        dtype=multiplied(problem.rhs),
        dims=(columns, rows, taps),
        strides=(row, row * rows),
        box=(*(rows_along_k if along_k(problem) else rows_along_n), 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )
