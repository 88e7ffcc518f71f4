"""conv2d_grouped_images in numbers: its config, what follows from it, and its kernel.

See ``kernels/cuda/conv2d_grouped_images.cuh``. Callers: the variant of the same name,
tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.conv2d_grouped import group
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.image_axis import Axis, axes
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem

_UNIT_BYTES = 16
_TEMPLATE = "conv2d_grouped_images"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedImagesConfig:
    """Partition of the work.

    Attributes:
      channels: of a block, whole groups of them.
      images: of a block.
      parts: in which the images arrive; the first is multiplied while others do.
      tiles: of 16 pixels that a warp multiplies at a time.
      threads: of a block; each group has as many warps.
      blocks: that a multiprocessor holds; fewer leave more registers to a thread.
    """

    channels: int
    images: int
    parts: int
    tiles: int
    threads: int
    blocks: int

    def __str__(self) -> str:
        return (
            f"c{self.channels} i{self.images} p{self.parts} t{self.tiles} "
            f"{self.threads} b{self.blocks}"
        )


def pitch_bytes(channels: int) -> int:
    """Bytes from pixel to pixel in shared memory; 8 pixels have banks of their own."""
    return 2 * channels + _UNIT_BYTES


def span(axis: Axis) -> int:
    """Rows or columns of an image in shared memory, with those around it."""
    return (axis.result - 1) * axis.class_stride + (axis.taps - 1) * axis.step + 1


def whole_axes(problem: Conv2dProblem) -> tuple[str, str]:
    """Rows and columns of what is read as the kernel's types."""
    rows, columns = (
        f"tracea::WholeAxis<{a.read}, {a.result}, {a.taps}, {a.class_stride}, "
        f"{a.step}, {a.first_read}>"
        for a in axes(problem)
    )
    return rows, columns


def smem_bytes(problem: Conv2dProblem, config: GroupedImagesConfig) -> int:
    """Bytes of a block: the weights of its groups, and its images."""
    rows, columns = axes(problem)
    weights = rows.taps * columns.taps * group(problem)
    pixels = config.images * span(rows) * span(columns)
    return (weights + pixels) * pitch_bytes(config.channels)


def registers(problem: Conv2dProblem, config: GroupedImagesConfig) -> int:
    """The fewest that a thread can do with: weights, sums, and addresses."""
    rows, columns = axes(problem)
    side = group(problem)
    weights = rows.taps * columns.taps * side * side // 64
    return weights + config.tiles * side // 2 + 48


def channel_blocks(problem: Conv2dProblem, config: GroupedImagesConfig) -> int:
    return -(-problem.in_channels // config.channels)


def blocks(problem: Conv2dProblem, config: GroupedImagesConfig) -> int:
    return -(-problem.batch // config.images) * channel_blocks(problem, config)


def kernel(
    problem: Conv2dProblem, config: GroupedImagesConfig, device: CudaDevice
) -> Kernel:
    """One launch; sizes of images are the kernel's own."""
    p, c = problem, config
    e = p.epilogue
    inputs = ["x", "w", *["bias"] * epilogues.has_bias(e), *["residual"] * e.residual]
    results = ["out", *["preactivation"] * e.save_preactivation]
    names = [*inputs, *results]
    fields = ("x", "w", "bias", "residual", "out", "preactivation")
    numbers = (p.batch, p.in_channels, channel_blocks(p, c))
    return Kernel(
        entry=_entry(p, c),
        source=_source(p, c),
        headers=sources.headers(f"{_TEMPLATE}.cuh"),
        arch=device.arch,
        grid=(blocks(p, c), 1, 1),
        block=(c.threads, 1, 1),
        smem_bytes=smem_bytes(p, c),
        params=(
            *(Pointer(operand=names.index(f) if f in names else -1) for f in fields),
            *(Scalar(value=value) for value in numbers),
        ),
    )


def _entry(p: Conv2dProblem, c: GroupedImagesConfig) -> str:
    rows, columns = axes(p)
    parts = [
        f"{_TEMPLATE}_g{group(p)}",
        "dx" if p.direction == "input_grad" else "",
        f"{SHORT[p.lhs]}_{SHORT[p.out]}_{rows.read}x{columns.read}",
        f"{rows.taps}x{columns.taps}",
        *epilogues.name_parts(p.epilogue),
        f"c{c.channels}_i{c.images}_p{c.parts}_t{c.tiles}_{c.threads}_b{c.blocks}",
    ]
    return "_".join(filter(None, parts))


def _source(p: Conv2dProblem, c: GroupedImagesConfig) -> str:
    rows, columns = whole_axes(p)
    return f"""\
// {_TEMPLATE} | {p.direction} {p.lhs} -> {p.out}, epilogue {p.epilogue}
#include "{_TEMPLATE}.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  using Rows = {rows};
  using Columns = {columns};
  static constexpr int kGroup = {group(p)}, kChannels = {c.channels}, \
kImages = {c.images}, kParts = {c.parts}, kTiles = {c.tiles};
  static constexpr int kThreads = {c.threads}, kSmemBytes = {smem_bytes(p, c)};
  static constexpr bool kFlips = {cxx(p.direction == "input_grad")};
{epilogues.convolution_traits(p)}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({c.threads}, {c.blocks})
{_entry(p, c)}(const void* x, const void* w, const void* bias, const void* residual,
    void* out, void* preactivation, int images, int channels, int channel_blocks) {{
  tracea::{_TEMPLATE}<Traits>(
      {{x, w, bias, residual, out, preactivation, images, channels, channel_blocks}});
}}
"""
