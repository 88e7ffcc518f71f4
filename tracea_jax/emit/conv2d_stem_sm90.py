"""conv2d_stem_sm90 as text: the kernel of a problem and a config, and its parameters.

The kernel reads pixels of four channels, and weights as a matrix of all taps; the
variant has both made by steps before it. Shared memory, grid and boxes are derived
here, and the generated Traits carry them to the device code, which asserts that it
arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.conv_results import (
    MAP_TYPE,
    ROW_BYTES,
    SLAB,
    WARPGROUP,
    consumer_bytes,
    conv_result_map,
    epilogue_buffers,
    finish_arguments,
    finish_params,
    finish_traits,
)
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

CHANNELS = 4  # of the pixels that the kernel reads
STRIDE = 2  # along a line: four pixels are 16 bytes, how wgmma reads neighbouring rows
_PIXEL_BYTES = 8
_PIECE = 48  # pixels of a line in one copy
_CONSUMERS = 2
_WINDOW_UNIT = 4  # pixels of a step of wgmma
_MOST_BOX_ROWS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dStemSm90Config:
    """The free choices of conv2d_stem_sm90.

    Attributes:
      lines, line_slabs: lines of the result, and slabs of 64 pixels in each, that a
        block computes at a time; two consumers share the lines.
      tile_n: channels of the result, whose weights stay in shared memory.
      stages: depth of the ring of lines of the image.
    """

    lines: int
    line_slabs: int
    tile_n: int
    stages: int

    @property
    def slabs(self) -> Any:
        """64-pixel slabs of each consumer."""
        return self.lines * self.line_slabs // _CONSUMERS

    @property
    def accumulators(self) -> Any:
        """f32 registers of each consumer thread."""
        return self.slabs * self.tile_n // 2

    def __str__(self) -> str:
        return f"{self.lines}x{self.line_slabs} n{self.tile_n} s{self.stages}"


def window(problem: Conv2dProblem) -> int:
    """Pixels of a line that a result is computed of: those of a tap, and zeros."""
    return -(-problem.kernel_width // _WINDOW_UNIT) * _WINDOW_UNIT


def depth(problem: Conv2dProblem) -> int:
    """Rows of the weights as a matrix."""
    return problem.kernel_height * window(problem) * CHANNELS


def lead(problem: Conv2dProblem) -> int:
    """Zeros in front of a line of the image that the kernel reads.

    Windows then begin at a multiple of 16 bytes, as copies must.
    """
    return problem.padding[1][0] % STRIDE


def padded_width(problem: Conv2dProblem) -> int:
    """Pixels in a line of the image that the kernel reads: 16 bytes and multiples."""
    width = lead(problem) + problem.width
    return width + width % 2


def _input_lines(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> Any:
    reach = (problem.kernel_height - 1) * problem.dilation[0]
    return (config.lines - 1) * problem.strides[0] + reach + 1


def _pieces(problem: Conv2dProblem) -> int:
    """Copies of a line of the image that 64 results are computed of."""
    return -(-(STRIDE * (SLAB - 1) + window(problem)) // _PIECE)


def box_bytes(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> Any:
    """Lines of the image for a slab of each line, in whole lines of 128 bytes."""
    line = _pieces(problem) * _PIECE * _PIXEL_BYTES
    return _input_lines(problem, config) * line


def smem_bytes(
    problem: Conv2dProblem, config: Conv2dStemSm90Config, epilogue_buffers: int = 2
) -> Any:
    """Shared memory of one block; without a count, the least that the kernel needs."""
    weights = -(-config.tile_n // SLAB) * depth(problem) * ROW_BYTES
    stage = config.line_slabs * box_bytes(problem, config) + 16
    each = consumer_bytes(problem, config.tile_n, epilogue_buffers)
    total = weights + 16 + config.stages * stage + _CONSUMERS * each
    period = SWIZZLE_128B.period_bytes
    return -(-total // period) * period


def tile_count(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> Any:
    """Tiles of pixels, for the same channels."""
    rows, columns = problem.out_size
    lines = -(-rows // config.lines)
    return problem.batch * lines * -(-columns // (SLAB * config.line_slabs))


def kernel(
    problem: Conv2dProblem, config: Conv2dStemSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are pixels, (batch, height, ``padded_width``, 4), weights, (``depth``,
    out_channels), then bias and residual if the epilogue has them; the results are the
    output, then the preactivation if it is saved.
    """
    wgmma = Wgmma(n=config.tile_n, lhs=problem.lhs, rhs=problem.rhs)
    headers = sources.headers("conv2d_stem_sm90.cuh")
    limit = device.smem_per_block_bytes
    buffers = epilogue_buffers(problem, config, smem_bytes, limit)
    n_tiles = -(-problem.out_channels // config.tile_n)
    each = min(int(tile_count(problem, config)), max(1, device.sm_count // n_tiles))
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, buffers, wgmma),
        headers=tuple(sorted((*headers, (wgmma.header_name, wgmma.header)))),
        arch=device.arch,
        grid=(n_tiles * each, 1, 1),
        block=(WARPGROUP * (1 + _CONSUMERS), 1, 1),
        smem_bytes=int(smem_bytes(problem, config, buffers)),
        params=_params(problem, config),
    )


def entry_name(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on sizes."""
    taps = f"{problem.kernel_height}x{window(problem)}"
    words = (
        *("conv2d_stem_sm90", epilogues.SHORT[problem.lhs]),
        *(epilogues.SHORT[problem.out], taps, f"s{problem.strides[0]}"),
        "" if problem.dilation[0] == 1 else f"d{problem.dilation[0]}",
        *epilogues.name_parts(problem.epilogue),
        str(config).replace(" ", "_"),
    )
    return "_".join(filter(None, words))


def _box_rows_w(problem: Conv2dProblem) -> int:
    """Rows of the weights in one copy: a divisor of their number."""
    rows = depth(problem)
    return next(n for n in range(_MOST_BOX_ROWS, 0, -1) if rows % n == 0)


def _params(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of its signature."""
    p = problem
    line = padded_width(p) * _PIXEL_BYTES
    row = p.out_channels * ITEMSIZE[p.rhs]
    rows, columns = p.out_size

    def finished(operand: int, dtype: str) -> TensorMap:
        size = (columns, rows, p.batch)
        return conv_result_map(operand, dtype, p.out_channels, *size)

    params = [
        TensorMap(
            operand=0,
            dtype="float32",  # two channels
            dims=(2 * padded_width(p), p.height, p.batch),
            strides=(line, line * p.height),
            box=(2 * _PIECE, 1, 1),
            swizzle=TensorMapSwizzle.NONE,
        ),
        TensorMap(
            operand=1,
            dtype=p.rhs,
            dims=(p.out_channels, depth(p), 1),
            strides=(row, row * depth(p)),
            box=(SLAB, _box_rows_w(p), 1),
            swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
        ),
        *finish_params(p, finished),
    ]
    (top, _), (left, _) = p.padding
    sizes = (p.batch, *p.out_size, p.out_channels, top, left - lead(p))
    return (*params, *(Scalar(value=value) for value in sizes))


def _source(
    problem: Conv2dProblem,
    config: Conv2dStemSm90Config,
    buffers: int,
    wgmma: Wgmma,
) -> str:
    """The translation unit: Traits and one entry."""
    epilogue = problem.epilogue
    parameters, finish = finish_arguments(epilogue)
    scalars = ("images", "rows", "columns", "n", "top", "left")
    signature = ", ".join(
        [
            f"{MAP_TYPE} x",
            f"{MAP_TYPE} w",
            *parameters,
            *(f"int {name}" for name in scalars),
        ]
    )
    return f"""\
// conv2d_stem_sm90 | {problem.lhs} -> {problem.out}, epilogue {epilogue} | {config}
#include "conv2d_stem_sm90.cuh"
#include "{wgmma.header_name}"

namespace {{
struct Traits {{
  using Mma = tracea::{wgmma.type_name}<0, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kScatters = false;
  static constexpr int kTaps = {problem.kernel_height}, kWindow = {window(problem)}, \
kDepth = {depth(problem)}, kStride = {problem.strides[0]}, \
kDilation = {problem.dilation[0]};
  static constexpr int kLines = {config.lines}, kLineSlabs = {config.line_slabs}, \
kTileN = {config.tile_n}, kSlabs = {config.slabs}, kConsumers = {_CONSUMERS};
  static constexpr int kStages = {config.stages}, \
kPieces = {_pieces(problem)}, kPiecePixels = {_PIECE}, \
kBoxBytes = {int(box_bytes(problem, config))}, \
kBoxRowsW = {_box_rows_w(problem)};
{finish_traits(problem, buffers, smem_bytes(problem, config, buffers))}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({WARPGROUP * (1 + _CONSUMERS)}, 1)
{entry_name(problem, config)}({signature}) {{
  tracea::conv2d_stem_sm90<Traits>({{&x, &w, {finish}, {", ".join(scalars)}}});
}}
"""
