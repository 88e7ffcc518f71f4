"""conv2d_weights_sm90 as text: the gradient of a convolution's weights on Hopper.

Here are its config, what follows from a problem and a config, and the launch; the
kernel is in ``kernels/cuda/conv2d_weights_sm90.cuh``. Callers: the variant of the same
name, and tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.conv_axes import im2col_map, strip_axes, walks
from tracea_jax.emit.conv_results import MAP_TYPE, ROW_BYTES, SLAB, WARPGROUP
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.kernel import Im2colMap, Kernel, Pointer, Scalar, TensorMapSwizzle
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

PIXELS = 64  # of a stage
_PERIOD = 8  # rows after which the swizzle begins again
_SMEM_UNIT = _PERIOD * ROW_BYTES
_HALF_BYTES = 112 << 10  # of a multiprocessor's shared memory, less what is reserved


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvWeightsSm90Config:
    """The free choices.

    Attributes:
      tile_m: channels of dy in a block, a multiple of 64.
      tile_n: channels of x in a block, in slabs of 64 that are of one tap each.
      consumers_m, consumers_n: warpgroups that split the tile.
      stages: depth of the ring, each 64 pixels.
      parts: ranges of pixels that are summed apart.
      taps: of a line of the filter that share one copy of x; all of them, or 1.
    """

    tile_m: int
    tile_n: int
    consumers_m: int
    consumers_n: int
    stages: int
    parts: int
    taps: int = 1

    @property
    def consumers(self) -> int:
        return self.consumers_m * self.consumers_n

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    @property
    def accumulators(self) -> int:
        """f32 registers of each consumer thread."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.consumers)

    @property
    def columns(self) -> int:
        """Columns of one instruction."""
        return self.tile_n // self.consumers_n

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n} w{self.consumers_m}x{self.consumers_n} "
            f"s{self.stages} p{self.parts}" + f" t{self.taps}" * (self.taps > 1)
        )


def group(problem: Conv2dProblem) -> int:
    """Channels of a group; of one group it does not matter how many."""
    return problem.in_channels // problem.groups if problem.groups > 1 else 1


def chunks(problem: Conv2dProblem) -> int:
    """Slabs of one tap that meet the same channels of dy."""
    return 1 if problem.groups > 1 else -(-problem.in_channels // SLAB)


def slabs(problem: Conv2dProblem) -> int:
    return problem.kernel_height * problem.kernel_width * chunks(problem)


def tiles(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> tuple[int, int]:
    """Tiles along the channels of dy, and along the slabs of x."""
    return (
        -(-problem.out_channels // config.tile_m),
        -(-slabs(problem) * SLAB // config.tile_n),
    )


def _line(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Pixels of a line of y as they are counted: with zeros where taps share copies."""
    _, columns = strip_axes(problem)
    return columns.extent if config.taps == 1 else columns.counted


def pixels(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Pixels of y as they are counted."""
    return problem.batch * problem.out_size[0] * _line(problem, config)


def steps(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Stages that all pixels fill."""
    return -(-pixels(problem, config) // PIXELS)


def copied_pixels(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Pixels of x in one copy of a stage."""
    return PIXELS + (config.taps - 1) * problem.dilation[1]


def rows_b(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Rows of 128 bytes of the copies of x in a stage: whole periods of the swizzle."""
    copies = config.tile_n // (SLAB * config.taps)
    return copies * -(-copied_pixels(problem, config) // _PERIOD) * _PERIOD


def smem_bytes(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Shared memory of a block."""
    stage = (config.tile_m + rows_b(problem, config)) * ROW_BYTES
    total = config.stages * (stage + 2 * 8)
    return -(-total // _SMEM_UNIT) * _SMEM_UNIT


def registers(config: ConvWeightsSm90Config) -> tuple[int, int]:
    """setmaxnreg of producer and consumers; zeros leave the launch's budget alone."""
    return {1: (0, 0), 2: (40, 232), 3: (32, 160)}.get(config.consumers, (24, 112))


def resident_blocks(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> int:
    """Blocks that a multiprocessor is to hold: two whose ring is the half of it."""
    is_small = smem_bytes(problem, config) <= _HALF_BYTES
    return 2 if config.consumers == 1 and is_small else 1


def kernel(
    problem: Conv2dProblem, config: ConvWeightsSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that leaves partial sums, (parts, R, S, C of a group, K) of float32.

    One part is the gradient itself, of the problem's dtype.
    """
    p = problem
    wgmma = Wgmma(n=config.columns, lhs=p.lhs, rhs=p.lhs)
    headers = sources.headers("conv2d_weights_sm90.cuh")
    m_tiles, n_tiles = tiles(p, config)
    (rows,), (columns,) = walks(p)
    scalars = (
        *(pixels(p, config), p.out_size[0], _line(p, config)),
        *(rows.first, columns.first, rows.stride, columns.stride),
        *(rows.offset_step, columns.offset_step),
        *(p.kernel_width, slabs(p), chunks(p)),
        *(p.in_channels, p.out_channels),
        *(n_tiles, m_tiles, config.parts),
    )
    return Kernel(
        entry=_entry(p, config),
        source=_source(p, config, wgmma),
        headers=tuple(sorted((*headers, (wgmma.header_name, wgmma.header)))),
        arch=device.arch,
        grid=(m_tiles * n_tiles * config.parts, 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem_bytes(p, config),
        params=(
            im2col_map(
                p,
                rows,
                dataclasses.replace(columns, extent=_line(p, config)),
                operand=0,
                dtype=p.lhs,
                channels=SLAB,
                pixels=copied_pixels(p, config),
            ),
            _gradient_map(p, config),
            Pointer(operand=2),
            *(Scalar(value=value) for value in scalars),
        ),
    )


def _gradient_map(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> Im2colMap:
    """Copies of 64 pixels by 64 channels of dy, as pixels are counted."""
    height, width = problem.out_size
    pixel = problem.out_channels * ITEMSIZE[problem.rhs]
    return Im2colMap(
        operand=1,
        dtype=problem.rhs,
        dims=(problem.out_channels, width, height, problem.batch),
        strides=(pixel, pixel * width, pixel * width * height),
        lower=(0, 0),
        upper=(_line(problem, config) - width, 0),
        channels=SLAB,
        pixels=PIXELS,
        element_strides=(1, 1, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _entry(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> str:
    """Name of the kernel; it depends neither on shapes nor on the number of parts."""
    c = config
    dtypes = SHORT[problem.lhs] + f"_{SHORT[problem.out]}" * (c.parts == 1)
    choices = f"{c.tile_m}x{c.tile_n}_w{c.consumers_m}x{c.consumers_n}_s{c.stages}"
    shared = f"_t{c.taps}x{problem.dilation[1]}" if c.taps > 1 else ""
    groups = f"_g{group(problem)}" * (problem.groups > 1)
    return f"conv2d_weights_sm90{groups}_{dtypes}_{choices}{shared}"


def _element(problem: Conv2dProblem, config: ConvWeightsSm90Config) -> str:
    """The type of what the kernel writes."""
    return CXX_TYPE["float32" if config.parts > 1 else problem.out]


_SCALARS = (
    *("pixels", "height", "width"),
    *("first_row", "first_column", "stride_h", "stride_w"),
    *("dilation_h", "dilation_w"),
    *("kernel_width", "slabs", "chunks", "channels", "out_channels"),
    *("n_tiles", "m_tiles", "parts"),
)


def _source(problem: Conv2dProblem, config: ConvWeightsSm90Config, wgmma: Wgmma) -> str:
    producer, consumer = registers(config)
    names = ", ".join(_SCALARS)
    scalars = ", ".join(f"int {name}" for name in _SCALARS)
    entry, blocks = _entry(problem, config), resident_blocks(problem, config)
    return f"""\
// conv2d_weights_sm90 | {problem.lhs} | {entry}
#include "conv2d_weights_sm90.cuh"
#include "{wgmma.header_name}"

namespace {{
struct Traits {{
  using Mma = tracea::{wgmma.type_name}<1, 1>;
  using ElementOut = {_element(problem, config)};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kStages = {config.stages};
  static constexpr int kConsumersM = {config.consumers_m}, \
kConsumersN = {config.consumers_n};
  static constexpr bool kIsGrouped = {cxx(problem.groups > 1)};
  static constexpr int kGroup = {group(problem)};
  static constexpr int kTaps = {config.taps}, kShift = {problem.dilation[1]}, \
kRowsB = {rows_b(problem, config)};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kSmemBytes = {smem_bytes(problem, config)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, {blocks})
{entry}({MAP_TYPE} x, {MAP_TYPE} dy, void* out, {scalars}) {{
  tracea::conv2d_weights_sm90<Traits>({{&x, &dy, out, {names}}});
}}
"""
