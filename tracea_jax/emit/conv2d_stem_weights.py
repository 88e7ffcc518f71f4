"""conv2d_stem_weights as text: the gradient of the weights of few channels.

Here are its config and the launch; the kernel is in
``kernels/cuda/conv2d_stem_weights.cuh``. Callers: the variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem

TILE_K = 64  # channels of dy in a block
COLUMNS = 16  # of y in a step
_PITCH_BYTES = 2 * TILE_K + 16
_WARP = 32
_BLOCK_ROWS = 16  # of the product, elements of a row of x


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StemWeightsConfig:
    """The free choices.

    Attributes:
      splits: warps of a row of taps, which take columns of y in turn.
      blocks: of a multiprocessor; together they are as many parts of the rows of y.
    """

    splits: int
    blocks: int

    def __str__(self) -> str:
        return f"s{self.splits} b{self.blocks}"


def pixel_channels(problem: Conv2dProblem) -> int:
    """Channels to which pixels are widened: a column of y to the next is 16 bytes."""
    is_even = problem.strides[1] % 2 == 0
    return 4 if problem.in_channels <= 4 and is_even else 8


def blocks_of_rows(problem: Conv2dProblem) -> int:
    """Blocks of 16 rows of the product."""
    return -(-problem.kernel_width * pixel_channels(problem) // _BLOCK_ROWS)


def threads(problem: Conv2dProblem, config: StemWeightsConfig) -> int:
    return _WARP * problem.kernel_height * config.splits


def smem_bytes(problem: Conv2dProblem) -> int:
    """Bytes of the ring of rows of x, and of two rows of dy."""
    p = problem
    _, out_width = p.out_size
    pixel = pixel_channels(p)
    seen = blocks_of_rows(p) * _BLOCK_ROWS // pixel
    pixels = (out_width - 1) * p.strides[1] + seen
    row = (pixels + pixels % 2) * pixel * 2
    return (p.kernel_height + p.strides[0]) * row + 2 * out_width * _PITCH_BYTES


def channel_tiles(problem: Conv2dProblem) -> int:
    return -(-problem.out_channels // TILE_K)


def parts(problem: Conv2dProblem, config: StemWeightsConfig, device: CudaDevice) -> int:
    """Ranges of rows of y, each a block's for each tile of channels."""
    at_once = config.blocks * device.sm_count // channel_tiles(problem)
    return max(1, min(at_once, problem.batch * problem.out_size[0]))


def kernel(
    problem: Conv2dProblem, config: StemWeightsConfig, device: CudaDevice
) -> Kernel:
    """The kernel that leaves partial sums, (parts * splits, R, S, C, K) of float32."""
    p = problem
    count = parts(p, config, device)
    scalars = (
        *(p.height, p.out_size[0], p.out_channels),
        *(-p.padding[0][0], -p.padding[1][0]),
        *(p.batch * p.out_size[0], count, channel_tiles(p)),
    )
    return Kernel(
        entry=_entry(p, config),
        source=_source(p, config),
        headers=sources.headers("conv2d_stem_weights.cuh"),
        arch=device.arch,
        grid=(count * channel_tiles(p), 1, 1),
        block=(threads(p, config), 1, 1),
        smem_bytes=smem_bytes(p),
        params=(
            *(Pointer(operand=i) for i in range(3)),
            *(Scalar(value=value) for value in scalars),
        ),
    )


def _entry(problem: Conv2dProblem, config: StemWeightsConfig) -> str:
    p = problem
    shape = f"{p.kernel_height}x{p.kernel_width}x{p.in_channels}"
    steps = "s{}x{}".format(*p.strides)
    widths = f"w{p.width}to{p.out_size[1]}"
    return "_".join(
        ("conv2d_stem_weights", SHORT[p.lhs], shape, steps, widths, f"p{config.splits}")
    )


_SCALARS = (
    *("height", "out_height", "out_channels", "first_row", "first_column"),
    *("rows", "parts", "channel_tiles"),
)


def _source(problem: Conv2dProblem, config: StemWeightsConfig) -> str:
    p = problem
    names = ", ".join(_SCALARS)
    scalars = ", ".join(f"int {name}" for name in _SCALARS)
    count = threads(p, config)
    return f"""\
// conv2d_stem_weights | {p.lhs} | {_entry(p, config)}
#include "conv2d_stem_weights.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  static constexpr int kTapsH = {p.kernel_height}, kTapsW = {p.kernel_width}, \
kChannels = {p.in_channels}, kPixel = {pixel_channels(p)};
  static constexpr int kStrideH = {p.strides[0]}, kStrideW = {p.strides[1]};
  static constexpr int kWidth = {p.width}, kOutWidth = {p.out_size[1]};
  static constexpr int kSplits = {config.splits}, kThreads = {count}, \
kSmemBytes = {smem_bytes(p)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({count}, 1)
{_entry(p, config)}(const void* x, const void* dy, float* partial, {scalars}) {{
  tracea::conv2d_stem_weights<Traits>({{x, dy, partial, {names}}});
}}
"""


def elements_of_image(problem: Conv2dProblem) -> int:
    """The most of one image, of x or of dy."""
    p = problem
    return max(
        p.height * p.width * p.in_channels, math.prod(p.out_size) * p.out_channels
    )
