"""conv2d_bands in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/conv2d_bands.cuh`` and ``conv2d_bands_weights.cuh``. Callers: the
variant of the same name, and tests.
"""

from __future__ import annotations

import dataclasses

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
# Registers of a row of taps, of addresses and fragments, of an epilogue or rows of dy.
_OF_TAPS, _ADDRESSES, _MORE = 14, 20, 8
_ACTIVATION = 86  # the fewest with one
_BIAS, _NARROW = 4, 16  # those of a bias beside one, in blocks of so few channels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BandsConfig:
    """Partition of the work; the share of a warp follows from it.

    Attributes:
      channels: of a block, two of each warp.
      strips: of an image in a block, 8 columns each; it has as many images as make 16.
      rows: of the result in a block, of the images one after another.
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
    """Bytes of a block: rows of images, two turned ones, two of the result, zeros.

    Of gradients of weights, rows of dy and two turned ones instead of the result.
    """
    c = config
    row, turned = _turned_rows(c.channels, c.images, c.strips + 1)
    if problem.direction == "weight_grad":
        row_dy, turned_dy = _turned_rows(c.channels, c.images, c.strips)
        return c.stages * (row + row_dy) + 2 * (turned + turned_dy) + _UNIT_BYTES
    out = c.channels // 8 * (8 * (STRIPS + 1) + 2) * _UNIT_BYTES
    return c.stages * row + 2 * turned + 2 * out + _UNIT_BYTES


def registers(problem: Conv2dProblem, config: BandsConfig) -> int:
    """The fewest that a thread can do with: sums, bands and addresses.

    A bias beside an activation stays in registers. In wide blocks there is room for it.
    """
    epilogue = problem.epilogue
    has_bias, activates = epilogues.has_bias(epilogue), epilogue.activation != "none"
    more = has_bias or activates or problem.direction == "weight_grad"
    fewest = _OF_TAPS * problem.kernel_height + _ADDRESSES + _MORE * more
    fewest += _BIAS * (has_bias and activates and config.channels <= _NARROW)
    return max(fewest, _ACTIVATION * activates)


def channel_blocks(problem: Conv2dProblem, config: BandsConfig) -> int:
    return -(-problem.in_channels // config.channels)


def column_blocks(problem: Conv2dProblem, config: BandsConfig) -> int:
    _, columns = axes(problem)
    return -(-columns.result // (config.strips * COLUMNS))


def all_rows(problem: Conv2dProblem, config: BandsConfig) -> int:
    """Rows of results of all images, as many images at a time as a block has."""
    rows, _ = axes(problem)
    groups = -(-problem.batch // config.images)
    return groups * column_blocks(problem, config) * rows.result


def parts(problem: Conv2dProblem, config: BandsConfig) -> int:
    """Blocks that share the rows; those of a gradient of weights leave a sum each."""
    return -(-all_rows(problem, config) // config.rows)


def blocks(problem: Conv2dProblem, config: BandsConfig) -> int:
    return channel_blocks(problem, config) * parts(problem, config)


def resident_blocks(
    problem: Conv2dProblem, config: BandsConfig, device: CudaDevice
) -> int:
    """Blocks that share a multiprocessor."""
    in_memory = device.blocks_in_smem(smem_bytes(problem, config))
    return max(min(config.blocks, in_memory), 1)


def kernel(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> Kernel:
    """The kernel of a forward convolution, or of the gradient of x.

    Of the gradient of weights, the one that leaves ``parts`` partial sums.
    """
    return Kernel(
        entry=_entry(problem, config),
        source=_source(problem, config),
        headers=sources.headers(f"{_template(problem)}.cuh"),
        arch=device.arch,
        grid=(blocks(problem, config), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem_bytes(problem, config),
        params=_params(problem, config),
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


def _params(problem: Conv2dProblem, config: BandsConfig) -> tuple[Param, ...]:
    p, c = problem, config
    scalars = [p.in_channels, channel_blocks(p, c), p.batch, *_sizes(p)]
    scalars += [column_blocks(p, c), c.rows, all_rows(p, c)]
    return (
        *(Pointer(operand=i) for i in range(3 + epilogues.has_bias(p.epilogue))),
        *(Scalar(value=value) for value in scalars),
    )


def _sizes(problem: Conv2dProblem) -> list[int]:
    """Extents of the image read and of the result, and where both begin to overlap."""
    rows, columns = axes(problem)
    sizes = [rows.read, columns.read, rows.result, columns.result]
    return [*sizes, rows.first_read, columns.first_read]


_SCALARS = (
    *("channels", "channel_blocks", "batch"),
    *("in_height", "in_width", "out_height", "out_width"),
    *("first_row", "first_column", "column_blocks", "block_rows", "all_rows"),
)


def _source(problem: Conv2dProblem, config: BandsConfig) -> str:
    p, c = problem, config
    if p.direction == "weight_grad":
        arrays = ["const void* x", "const void* dy", "float* partial"]
        names = "x, dy, partial"
        more = ""
    else:
        bias = epilogues.has_bias(p.epilogue)
        arrays = [f"const void* {name}" for name in ("x", "w", *["bias"] * bias)]
        arrays.append("void* out")
        names = f"x, w, {'bias' if bias else 'nullptr'}, out"
        flips = cxx(p.direction == "input_grad")
        more = f"""
  static constexpr bool kFlips = {flips};
{epilogues.convolution_traits(p)}"""
    parameters = ", ".join([*arrays, *(f"int {name}" for name in _SCALARS)])
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
  tracea::{_template(p)}<Traits>({{{", ".join([names, *_SCALARS])}}});
}}
"""
