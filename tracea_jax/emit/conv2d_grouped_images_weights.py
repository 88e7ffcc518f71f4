"""conv2d_grouped_images_weights in numbers: its config, what follows, and its kernel.

See ``kernels/cuda/conv2d_grouped_images_weights.cuh``. Callers: the variant of the same
name, tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.conv2d_grouped import group
from tracea_jax.emit.conv2d_grouped_images import pitch_bytes, span, whole_axes
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT
from tracea_jax.emit.image_axis import axes
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem

_WARP, _SIDE = 32, 16  # threads; channels of x that a warp has
_TEMPLATE = "conv2d_grouped_images_weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedImagesWeightsConfig:
    """How the work is cut.

    Attributes:
      channels: of a block, whole groups of them.
      images: of a block; each block leaves sums of its own.
      parts: in which the images arrive; the first is multiplied while others do.
      splits: warps that share the pixels of the same channels.
      blocks: that a multiprocessor holds; fewer leave more registers to a thread.
    """

    channels: int
    images: int
    parts: int
    splits: int
    blocks: int

    @property
    def threads(self) -> int:
        return _WARP * self.channels // _SIDE * self.splits

    def __str__(self) -> str:
        return (
            f"c{self.channels} i{self.images} p{self.parts} x{self.splits} "
            f"b{self.blocks}"
        )


def sums(problem: Conv2dProblem) -> int:
    """Of a thread."""
    return problem.kernel_height * problem.kernel_width * group(problem) // 2


def registers(problem: Conv2dProblem) -> int:
    """The fewest that a thread can do with: sums, fragments and addresses."""
    return sums(problem) + group(problem) // 4 + 48


def smem_bytes(problem: Conv2dProblem, config: GroupedImagesWeightsConfig) -> int:
    """Bytes of a block: images of x and dy; later, sums that splits give away."""
    p, c = problem, config
    rows, columns = axes(p)
    pixels = span(rows) * span(columns) + rows.result * columns.result
    given = c.threads // c.splits * (c.splits // 2) * sums(p) * 4
    return max(c.images * pixels * pitch_bytes(c.channels), given)


def parts(problem: Conv2dProblem, config: GroupedImagesWeightsConfig) -> int:
    """Partial sums of each weight."""
    return -(-problem.batch // config.images)


def blocks(problem: Conv2dProblem, config: GroupedImagesWeightsConfig) -> int:
    return parts(problem, config) * -(-problem.in_channels // config.channels)


def kernel(
    problem: Conv2dProblem, config: GroupedImagesWeightsConfig, device: CudaDevice
) -> Kernel:
    """The kernel that leaves partial sums, (parts, R, S, channels of a group, K)."""
    p, c = problem, config
    return Kernel(
        entry=_entry(p, c),
        source=_source(p, c),
        headers=sources.headers(f"{_TEMPLATE}.cuh"),
        arch=device.arch,
        grid=(blocks(p, c), 1, 1),
        block=(c.threads, 1, 1),
        smem_bytes=smem_bytes(p, c),
        params=(
            *(Pointer(operand=i) for i in range(3)),
            Scalar(value=p.batch),
            Scalar(value=p.in_channels),
            Scalar(value=blocks(p, c) // parts(p, c)),
        ),
    )


def _entry(p: Conv2dProblem, c: GroupedImagesWeightsConfig) -> str:
    rows, columns = axes(p)
    words = (
        f"{_TEMPLATE}_g{group(p)}_{SHORT[p.lhs]}_{rows.read}x{columns.read}",
        f"{rows.taps}x{columns.taps}_c{c.channels}_i{c.images}_p{c.parts}_x{c.splits}",
        f"b{c.blocks}",
    )
    return "_".join(words)


def _source(p: Conv2dProblem, c: GroupedImagesWeightsConfig) -> str:
    rows, columns = whole_axes(p)
    of_result = [
        f"tracea::WholeAxis<{a.result}, {a.result}, 1, 1, 1, 0>" for a in axes(p)
    ]
    return f"""\
// {_TEMPLATE} | {p.lhs}
#include "{_TEMPLATE}.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  using Rows = {rows};
  using Columns = {columns};
  using ResultRows = {of_result[0]};
  using ResultColumns = {of_result[1]};
  static constexpr int kGroup = {group(p)}, kChannels = {c.channels}, \
kImages = {c.images}, kParts = {c.parts}, kSplits = {c.splits};
  static constexpr int kThreads = {c.threads}, kSmemBytes = {smem_bytes(p, c)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({c.threads}, {c.blocks})
{_entry(p, c)}(const void* x, const void* dy, float* partial, int images,
    int channels, int channel_blocks) {{
  tracea::{_TEMPLATE}<Traits>({{x, dy, partial, images, channels, channel_blocks}});
}}
"""
