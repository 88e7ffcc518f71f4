"""conv2d_strips_sm90 as text: the kernel of a problem and a config, and its parameters.

The geometry of strips, shared memory, grid and boxes are derived here by pure
functions, and the generated Traits carry them to the device code, which asserts that it
arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.conv_axes import source_channels, strip_axes
from tracea_jax.emit.conv_operands import (
    along_k,
    channels_out,
    chunk,
    multiplied,
    rows_b,
    weights_map,
    wgmma,
)
from tracea_jax.emit.conv_results import (
    MAP_TYPE,
    ROW_BYTES,
    SLAB,
    WARPGROUP,
    consumer_bytes,
    conv_walked_map,
    epilogue_buffers,
    finish_arguments,
    finish_params,
    finish_traits,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import (
    Im2colMap,
    Kernel,
    Param,
    Scalar,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

CONSUMERS = 2
STRIPS = 2  # in shared memory, so that one arrives while the other is read
_MOST_COPY_ROWS = 256
_GROUP = 8  # rows of the swizzle's period


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dStripsSm90Config:
    """The free choices of conv2d_strips_sm90.

    Attributes:
      tile_m, tile_n: pixels and channels of the result that a block computes at a time.
      stages: weights of as many taps are in shared memory, of a chunk of channels each.
      resident: all of them are, and stay.
      ping_pong: consumers take tiles in turn, one finishes its own while the other
        multiplies.
    """

    tile_m: int
    tile_n: int
    stages: int
    resident: bool = False
    ping_pong: bool = False

    @property
    def tile_consumers(self) -> Any:
        """Warpgroups that share a tile."""
        return CONSUMERS - (CONSUMERS - 1) * self.ping_pong

    @property
    def slabs(self) -> Any:
        """64-pixel slabs of each consumer."""
        return self.tile_m // (SLAB * self.tile_consumers)

    @property
    def accumulators(self) -> Any:
        """f32 registers of each consumer thread."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.tile_consumers)

    def __str__(self) -> str:
        words = " resident" * self.resident + " pp" * self.ping_pong
        return f"{self.tile_m}x{self.tile_n} s{self.stages}{words}"


def computed_pixels(problem: Conv2dProblem) -> int:
    """Rows of the implicit product, with those that are no pixels of the result."""
    rows, columns = strip_axes(problem)
    return problem.batch * rows.counted * columns.counted


def copies(problem: Conv2dProblem, tile_m: Any) -> tuple[Any, Any]:
    """Number of copies for a strip, and the rows of each."""
    rows, columns = strip_axes(problem)
    needed = tile_m + rows.reach * columns.counted + columns.reach
    count = -(-needed // _MOST_COPY_ROWS)
    each = -(-needed // count)
    return count, -(-each // _GROUP) * _GROUP


def strip_rows(problem: Conv2dProblem, tile_m: Any) -> Any:
    count, each = copies(problem, tile_m)
    return count * each


def all_weights(problem: Conv2dProblem) -> int:
    """Stages that hold the weights of all taps and chunks."""
    taps = problem.kernel_height * problem.kernel_width
    return taps * -(-source_channels(problem) // chunk(problem))


def smem_bytes(
    problem: Conv2dProblem, config: Conv2dStripsSm90Config, epilogue_buffers: int = 2
) -> Any:
    """Shared memory of one block; without a count, the least that the kernel needs."""
    strips = STRIPS * (strip_rows(problem, config.tile_m) * ROW_BYTES + 16)
    weights = config.stages * (rows_b(problem, config.tile_n) * ROW_BYTES + 16)
    each = consumer_bytes(problem, config.tile_n, epilogue_buffers)
    total = strips + weights + CONSUMERS * each
    period = SWIZZLE_128B.period_bytes
    return -(-total // period) * period


def tile_count(problem: Conv2dProblem, config: Conv2dStripsSm90Config) -> Any:
    m_tiles = -(-computed_pixels(problem) // config.tile_m)
    return m_tiles * -(-channels_out(problem) // config.tile_n)


def kernel(
    problem: Conv2dProblem, config: Conv2dStripsSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are lhs, rhs as ``conv_operands`` says, then bias and residual if the
    epilogue has them; the results are the output, then the preactivation if saved.
    """
    product = wgmma(problem, config.tile_n)
    headers = sources.headers("conv2d_strips_sm90.cuh")
    limit = device.smem_per_block_bytes
    buffers = epilogue_buffers(problem, config, smem_bytes, limit)
    n_tiles = -(-channels_out(problem) // config.tile_n)
    # A block whose weights stay computes tiles of the same channels.
    blocks = device.sm_count // n_tiles * n_tiles or n_tiles
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, buffers, product),
        headers=tuple(sorted((*headers, (product.header_name, product.header)))),
        arch=device.arch,
        grid=(min(int(tile_count(problem, config)), blocks), 1, 1),
        block=(WARPGROUP * (1 + CONSUMERS), 1, 1),
        smem_bytes=int(smem_bytes(problem, config, buffers)),
        params=_params(problem, config),
    )


def entry_name(problem: Conv2dProblem, config: Conv2dStripsSm90Config) -> str:
    """Name of the kernel, readable in a profiler."""
    rows, columns = strip_axes(problem)
    words = (
        "conv2d_strips_sm90",
        "dgrad" if problem.direction == "input_grad" else "fprop",
        *(epilogues.SHORT[problem.lhs], epilogues.SHORT[problem.out]),
        f"{rows.taps}x{columns.taps}",
        "" if rows.step == columns.step == 1 else f"d{rows.step}x{columns.step}",
        f"c{chunk(problem)}",
        f"rows{strip_rows(problem, config.tile_m)}",
        *epilogues.name_parts(problem.epilogue),
        str(config).replace(" ", "_"),
    )
    return "_".join(filter(None, words))


def _pixels_map(problem: Conv2dProblem, config: Conv2dStripsSm90Config) -> Im2colMap:
    """The source, counted with its zeros."""
    rows, columns = strip_axes(problem)
    depth = source_channels(problem)
    pixel = depth * ITEMSIZE[problem.lhs]
    _, each = copies(problem, config.tile_m)
    return Im2colMap(
        operand=0,
        dtype=multiplied(problem.lhs),
        dims=(depth, columns.size, rows.size, problem.batch),
        strides=(pixel, pixel * columns.size, pixel * columns.size * rows.size),
        lower=(-columns.before, -rows.before),
        upper=tuple(a.counted - a.size - a.before for a in (columns, rows)),
        channels=chunk(problem),
        pixels=each,
        element_strides=(1, 1, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _params(
    problem: Conv2dProblem, config: Conv2dStripsSm90Config
) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of its signature."""
    p = problem
    rows, columns = strip_axes(problem)

    def finished(operand: int, dtype: str) -> Im2colMap:
        return conv_walked_map(
            operand,
            dtype,
            (channels_out(p), columns.extent, rows.extent, p.batch),
            (columns.counted, rows.counted),
        )

    params = [
        _pixels_map(problem, config),
        weights_map(problem, config.tile_n),
        *finish_params(problem, finished, is_scattered=True),
    ]
    sizes = (
        *(p.batch, rows.counted, columns.counted),
        *(channels_out(p), source_channels(p), rows.before, columns.before),
        *(rows.extent, columns.extent),
    )
    return (*params, *(Scalar(value=value) for value in sizes))


def _source(
    problem: Conv2dProblem,
    config: Conv2dStripsSm90Config,
    buffers: int,
    product: Wgmma,
) -> str:
    """The translation unit: Traits and one entry."""
    epilogue = problem.epilogue
    flips = problem.direction == "input_grad"
    rows, columns = strip_axes(problem)
    parameters, finish = finish_arguments(epilogue, is_scattered=True)
    scalars = ("images", "lines", "line", "n", "channels", "top", "left")
    sizes = (*scalars, "rows", "columns")
    signature = ", ".join(
        [
            f"{MAP_TYPE} x",
            f"{MAP_TYPE} w",
            *parameters,
            *(f"int {name}" for name in sizes),
        ]
    )
    types = f"{problem.lhs} -> {problem.out} {problem.direction}"
    copy_rows = int(copies(problem, config.tile_m)[1])
    return f"""\
// conv2d_strips_sm90 | {types}, epilogue {epilogue} | {config}
#include "conv2d_strips_sm90.cuh"
#include "{product.header_name}"

namespace {{
struct Traits {{
  using Mma = tracea::{product.type_name}<0, {int(not along_k(problem))}>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kScatters = true, kTransB = {cxx(along_k(problem))}, \
kFlips = {cxx(flips)}, kResident = {cxx(config.resident)};
  static constexpr int kTapsH = {rows.taps}, kTapsW = {columns.taps}, \
kDilationH = {rows.step}, kDilationW = {columns.step};
  static constexpr int kElementBytes = {ITEMSIZE[problem.lhs]}, \
kChunk = {chunk(problem)}, kRowsB = {int(rows_b(problem, config.tile_n))}, \
kStripRows = {int(strip_rows(problem, config.tile_m))}, kCopyRows = {copy_rows};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kSlabs = {config.slabs}, kConsumers = {CONSUMERS};
  static constexpr bool kPingPong = {cxx(config.ping_pong)};
  static constexpr int kStrips = {STRIPS}, kStages = {config.stages};
{finish_traits(problem, buffers, smem_bytes(problem, config, buffers))}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({WARPGROUP * (1 + CONSUMERS)}, 1)
{entry_name(problem, config)}({signature}) {{
  tracea::conv2d_strips_sm90<Traits>({{&x, &w, {finish}, {", ".join(scalars)}}});
}}
"""
