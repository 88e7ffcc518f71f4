"""conv2d_bands in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/conv2d_bands.cuh`` and ``conv2d_bands_weights.cuh``. Callers: the
variant of the same name, and tests.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.image_axis import axes
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem

STRIPS = 16  # rows of a product
COLUMNS = 8  # of a strip
_CHANNELS_OF_WARP, _WARP = 2, 32
_UNIT_BYTES = 16
# Registers of a row of taps, of addresses and fragments, and of an epilogue.
_OF_TAPS, _ADDRESSES, _EPILOGUE = 14, 20, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BandsConfig:
    """How the work is cut; what a warp computes follows.

    Attributes:
      channels: of a block, two of each warp.
      strips: of an image in a block, 8 columns each; it has as many images as make 16.
      rows: of the result in a block.
      stages: rows of the images in shared memory, one of them being turned.
      blocks: that a multiprocessor holds; fewer leave more registers to a thread.
    """

    channels: int
    strips: int
    rows: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        return _WARP * self.channels // _CHANNELS_OF_WARP

    @property
    def images(self) -> int:
        return STRIPS // self.strips

    def __str__(self) -> str:
        return (
            f"c{self.channels} s{self.strips} r{self.rows} st{self.stages} "
            f"b{self.blocks}"
        )


def _turned_rows(channels: int, images: int, units: int) -> tuple[int, int]:
    """Bytes of a row as it arrives, and turned."""
    row = images * units * COLUMNS * (2 * channels + _UNIT_BYTES)
    return row, channels * (images * units | 1) * _UNIT_BYTES


def smem_bytes(problem: Conv2dProblem, config: BandsConfig) -> int:
    """Bytes of a block: rows of images, two turned ones, and two of the result.

    Of gradients of weights, rows of dy and two turned ones, and a unit of zeros.
    """
    c = config
    row, turned = _turned_rows(c.channels, c.images, c.strips + 1)
    if problem.direction == "weight_grad":
        row_dy, turned_dy = _turned_rows(c.channels, c.images, c.strips)
        return c.stages * (row + row_dy) + 2 * (turned + turned_dy) + _UNIT_BYTES
    out = c.channels // 8 * (8 * (STRIPS + 1) + 2) * _UNIT_BYTES
    return c.stages * row + 2 * turned + 2 * out


def registers(problem: Conv2dProblem) -> int:
    """The fewest that a thread can do with: sums, bands and addresses."""
    epilogue = problem.epilogue
    more = epilogues.has_bias(epilogue) or epilogue.activation != "none"
    return _OF_TAPS * problem.kernel_height + _ADDRESSES + _EPILOGUE * more


def tiles(problem: Conv2dProblem, config: BandsConfig) -> tuple[int, int, int, int]:
    """Blocks along channels, columns, rows and images."""
    rows, columns = axes(problem)
    return (
        -(-problem.in_channels // config.channels),
        -(-columns.result // (config.strips * COLUMNS)),
        -(-rows.result // config.rows),
        -(-problem.batch // config.images),
    )


def parts(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> int:
    """Partial sums of each weight: of as many blocks as run at once, each its tiles."""
    channel_blocks, *pieces = tiles(problem, config)
    in_memory = device.smem_per_block_bytes // smem_bytes(problem, config)
    at_once = device.sm_count * max(min(config.blocks, in_memory), 1)
    most = max(at_once // channel_blocks, 1)
    count = math.prod(pieces)
    return -(-count // -(-count // most))


def blocks(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> int:
    channel_blocks, *pieces = tiles(problem, config)
    if problem.direction == "weight_grad":
        return channel_blocks * parts(problem, config, device)
    return channel_blocks * math.prod(pieces)


def kernel(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> Kernel:
    """The kernel of a forward convolution, or of the gradient of x.

    Of the gradient of weights, the one that leaves ``parts`` partial sums.
    """
    return Kernel(
        entry=_entry(problem, config),
        source=_source(problem, config),
        headers=sources.headers(f"{_template(problem)}.cuh"),
        arch=device.arch,
        grid=(blocks(problem, config, device), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem_bytes(problem, config),
        params=_params(problem, config, device),
    )


def _template(problem: Conv2dProblem) -> str:
    return "conv2d_bands" + "_weights" * (problem.direction == "weight_grad")


def _entry(problem: Conv2dProblem, config: BandsConfig) -> str:
    p, c = problem, config
    words = [
        _template(p),
        "dx" if p.direction == "input_grad" else "",
        f"{SHORT[p.lhs]}_{p.kernel_height}x{p.kernel_width}",
        *epilogues.name_parts(p.epilogue),
        f"c{c.channels}_s{c.strips}_st{c.stages}_b{c.blocks}",
    ]
    return "_".join(filter(None, words))


def _params(
    problem: Conv2dProblem, config: BandsConfig, device: CudaDevice
) -> tuple[Param, ...]:
    p = problem
    channel_blocks, column_blocks, row_blocks, groups = tiles(p, config)
    scalars = [p.in_channels, channel_blocks, p.batch, *_sizes(p)]
    scalars += [row_blocks, column_blocks, config.rows]
    if p.direction == "weight_grad":
        scalars += [column_blocks * row_blocks * groups, parts(p, config, device)]
    return (
        *(Pointer(operand=i) for i in range(3 + epilogues.has_bias(p.epilogue))),
        *(Scalar(value=value) for value in scalars),
    )


def _sizes(problem: Conv2dProblem) -> list[int]:
    """Of what is read and of what it meets, and where they meet first."""
    rows, columns = axes(problem)
    sizes = [rows.read, columns.read, rows.result, columns.result]
    return [*sizes, rows.first_read, columns.first_read]


_SCALARS = (
    *("channels", "channel_blocks", "batch"),
    *("in_height", "in_width", "out_height", "out_width"),
    *("first_row", "first_column", "row_blocks", "column_blocks", "block_rows"),
)


def _source(problem: Conv2dProblem, config: BandsConfig) -> str:
    p, c = problem, config
    if p.direction == "weight_grad":
        arrays = ["const void* x", "const void* dy", "float* partial"]
        names, scalars = "x, dy, partial", [*_SCALARS, "tiles", "parts"]
        more = ""
    else:
        bias = epilogues.has_bias(p.epilogue)
        arrays = [f"const void* {name}" for name in ("x", "w", *["bias"] * bias)]
        arrays.append("void* out")
        names = f"x, w, {'bias' if bias else 'nullptr'}, out"
        scalars = [*_SCALARS]
        flips = cxx(p.direction == "input_grad")
        more = f"""
  static constexpr bool kFlips = {flips};
{epilogues.convolution_traits(p)}"""
    parameters = ", ".join([*arrays, *(f"int {name}" for name in scalars)])
    return f"""\
// {_template(p)} | {p.kernel_height}x{p.kernel_width} {p.direction} {p.lhs}, \
epilogue {p.epilogue}
#include "{_template(p)}.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  static constexpr int kTapsH = {p.kernel_height}, kTapsW = {p.kernel_width};
  static constexpr int kChannels = {c.channels}, kStrips = {c.strips}, \
kImages = {c.images}, kStages = {c.stages};
  static constexpr int kThreads = {c.threads}, kSmemBytes = {smem_bytes(p, c)};{more}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({c.threads}, {c.blocks})
{_entry(p, c)}({parameters}) {{
  tracea::{_template(p)}<Traits>({{{", ".join([names, *scalars])}}});
}}
"""
