"""conv2d_sm90 as text: the kernel of a problem and a config, and its parameters.

A config holds the free choices; shared memory, threads, grid and boxes of copies are
derived here by pure functions, and the generated Traits carry them to the device code,
which asserts that it arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.conv_axes import ConvAxis, im2col_map, source_channels, walks
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
    conv_result_map,
    epilogue_buffers,
    finish_arguments,
    finish_params,
    finish_traits,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Scalar,
    TensorMap,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

OUT_DTYPES = tuple(epilogues.CXX_TYPE)
MAX_STAGES = 10
_RASTER_BAND = 8
_WAIT_DEPTH = 1  # batches of wgmma in flight while the next one is issued


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dSm90Config:
    """The free choices of conv2d_sm90.

    Attributes:
      tile_m, tile_n: pixels and channels of the result that a block computes at a time.
      stages: depth of the ring of tiles, each a tap by a chunk of channels.
      consumers: warpgroups that multiply; they split the pixels of the tile.
      ping_pong: consumers take tiles in turn, one finishes its own while the other
        multiplies.
      cluster: blocks, neighbours along the pixels, that copy weights for each other.
    """

    tile_m: int
    tile_n: int
    stages: int
    consumers: int = 2
    ping_pong: bool = False
    cluster: int = 1

    @property
    def tile_consumers(self) -> Any:
        """Warpgroups that share a tile."""
        return 1 + (self.consumers - 1) * (1 - self.ping_pong)

    @property
    def slabs(self) -> Any:
        """64-pixel slabs of each consumer."""
        return self.tile_m // (SLAB * self.tile_consumers)

    @property
    def accumulators(self) -> Any:
        """f32 registers of each consumer thread."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.tile_consumers)

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    def __str__(self) -> str:
        words = " pp" * self.ping_pong + f" c{self.cluster}" * (self.cluster > 1)
        return f"{self.tile_m}x{self.tile_n} s{self.stages} w{self.consumers}{words}"


def k_steps(problem: Conv2dProblem) -> int:
    """Stages of a tile with all taps."""
    taps = problem.kernel_height * problem.kernel_width
    return taps * -(-source_channels(problem) // chunk(problem))


def scatters(problem: Conv2dProblem) -> bool:
    """Returns whether neighbours among the pixels of a tile are none in memory."""
    return problem.direction == "input_grad" and problem.strides != (1, 1)


def smem_bytes(
    problem: Conv2dProblem, config: Conv2dSm90Config, epilogue_buffers: int = 2
) -> Any:
    """Shared memory of one block; without a count, the least that the kernel needs."""
    stage = (config.tile_m + rows_b(problem, config.tile_n)) * ROW_BYTES
    each = consumer_bytes(problem, config.tile_n, epilogue_buffers)
    total = config.stages * (stage + 16) + config.consumers * each
    period = SWIZZLE_128B.period_bytes
    return -(-total // period) * period


def most_stages(problem: Conv2dProblem, config: Any, limit_bytes: int) -> int:
    """The deepest ring that fits beside two staging buffers; 0 if none does."""
    rings = (dataclasses.replace(config, stages=s) for s in range(1, MAX_STAGES + 1))
    fitting = (r.stages for r in rings if smem_bytes(problem, r) <= limit_bytes)
    return max(fitting, default=0)


def registers(config: Conv2dSm90Config) -> tuple[int, int]:
    """setmaxnreg of producer and consumers; zeros leave the launch's budget alone."""
    return {1: (0, 0), 2: (40, 232), 3: (32, 160)}[config.consumers]


def pixels(problem: Conv2dProblem) -> int:
    """Rows of the implicit product, over all phases."""
    rows, columns = walks(problem)
    return problem.batch * sum(
        h.extent * w.extent for h, w in itertools.product(rows, columns)
    )


def tile_count(problem: Conv2dProblem, config: Conv2dSm90Config) -> Any:
    """Tiles of all phases, a cluster's counted once."""
    rows, columns = walks(problem)
    m_tiles = sum(
        -(-problem.batch * h.extent * w.extent // (config.tile_m * config.cluster))
        for h, w in itertools.product(rows, columns)
    )
    return m_tiles * -(-channels_out(problem) // config.tile_n)


def grid(problem: Conv2dProblem, config: Conv2dSm90Config, sm_count: int) -> int:
    """Blocks of the persistent launch: whole clusters."""
    clusters = np.minimum(tile_count(problem, config), sm_count // config.cluster)
    return config.cluster * int(np.maximum(clusters, 1))


def kernel(
    problem: Conv2dProblem, config: Conv2dSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are lhs, rhs as ``conv_operands`` says, then bias and residual if the
    epilogue has them; the results are the output, then the preactivation if it is
    saved. Sizes of images and kernels stay out of the source: one cubin serves all that
    share the width of a chunk.
    """
    product = wgmma(problem, config.tile_n)
    headers = sources.headers("conv2d_sm90.cuh")
    limit = device.smem_per_block_bytes
    buffers = epilogue_buffers(problem, config, smem_bytes, limit)
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, buffers, product),
        headers=tuple(sorted((*headers, (product.header_name, product.header)))),
        arch=device.arch,
        grid=(grid(problem, config, device.sm_count), 1, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster, 1, 1),
        smem_bytes=int(smem_bytes(problem, config, buffers)),
        params=_params(problem, config),
    )


def entry_name(problem: Conv2dProblem, config: Conv2dSm90Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on shapes."""
    full_row = ROW_BYTES // ITEMSIZE[problem.lhs]
    words = (
        "conv2d_sm90",
        "dgrad" if problem.direction == "input_grad" else "fprop",
        epilogues.SHORT[problem.lhs],
        epilogues.SHORT[problem.out],
        "" if chunk(problem) == full_row else f"c{chunk(problem)}",
        "scattered" * scatters(problem),
        *epilogues.name_parts(problem.epilogue),
        str(config).replace(" ", "_"),
    )
    return "_".join(filter(None, words))


def _has_tail(problem: Conv2dProblem, config: Conv2dSm90Config) -> bool:
    """Returns whether a last, narrow slab of weights has a tensor map of its own."""
    return not along_k(problem) and config.tile_n % SLAB != 0


def _params(problem: Conv2dProblem, config: Conv2dSm90Config) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_signature``."""
    rows, columns = walks(problem)
    weights = weights_map(problem, config.tile_n, config.cluster)
    params: list[Param] = [
        im2col_map(
            problem,
            # A phase without taps copies nothing, whatever its map.
            h if h.taps else rows[0],
            w if w.taps else columns[0],
            operand=0,
            dtype=multiplied(problem.lhs),
            channels=chunk(problem),
            pixels=config.tile_m,
        )
        for h, w in itertools.product(rows, columns)
    ]
    params.append(weights)
    if _has_tail(problem, config):
        box = (config.tile_n % SLAB, *weights.box[1:])
        params.append(dataclasses.replace(weights, box=box))
    lines = (pixels(problem), 1, 1)  # a result, or a residual, is one line of all

    def finished(operand: int, dtype: str) -> TensorMap:
        return conv_result_map(operand, dtype, channels_out(problem), *lines)

    params += finish_params(problem, finished, is_scattered=scatters(problem))
    sizes = (
        *(problem.batch, channels_out(problem), source_channels(problem)),
        *(problem.kernel_width, problem.height, problem.width),
        *(value for walk in (*rows, *columns) for value in dataclasses.astuple(walk)),
    )
    return (*params, *(Scalar(value=value) for value in sizes))


def _source(
    problem: Conv2dProblem, config: Conv2dSm90Config, buffers: int, product: Wgmma
) -> str:
    """The translation unit: Traits and one entry."""
    in_rows = along_k(problem)
    rows, columns = walks(problem)
    producer, consumer = registers(config)
    signature, arguments = _signature(problem, config, rows, columns)
    types = f"{problem.lhs} -> {problem.out} {problem.direction}"
    return f"""\
// conv2d_sm90 | {types}, epilogue {problem.epilogue} | {config}
#include "conv2d_sm90.cuh"
#include "{product.header_name}"

namespace {{
struct Traits {{
  using Mma = tracea::{product.type_name}<0, {int(not in_rows)}>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kTransB = {cxx(in_rows)}, \
kHasTailB = {cxx(_has_tail(problem, config))}, kScatters = {cxx(scatters(problem))};
  static constexpr int kElementBytes = {ITEMSIZE[problem.lhs]}, \
kChunk = {chunk(problem)}, kRowsB = {int(rows_b(problem, config.tile_n))};
  static constexpr int kPhasesH = {len(rows)}, kPhasesW = {len(columns)};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kSlabs = {config.slabs}, kConsumers = {config.consumers}, kCluster = {config.cluster};
  static constexpr bool kPingPong = {cxx(config.ping_pong)};
  static constexpr int kStages = {config.stages}, kWaitDepth = {_WAIT_DEPTH}, \
kRasterBand = {_RASTER_BAND};
  static constexpr unsigned kFirstEmptyParity = \
{Ring(stages=config.stages).producer_parity(0)};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
{finish_traits(problem, buffers, smem_bytes(problem, config, buffers))}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({signature}) {{
  tracea::conv2d_sm90<Traits>({{{arguments}}});
}}
"""


def _signature(
    problem: Conv2dProblem,
    config: Conv2dSm90Config,
    rows: tuple[ConvAxis, ...],
    columns: tuple[ConvAxis, ...],
) -> tuple[str, str]:
    """Parameters of the entry, and the fields of ``ConvSm90Params`` made of them."""
    epilogue = problem.epilogue
    of_phase = [[f"a{i}{j}" for j in range(len(columns))] for i in range(len(rows))]
    has_tail = _has_tail(problem, config)
    results, finish = finish_arguments(epilogue, is_scattered=scatters(problem))
    maps = [*itertools.chain(*of_phase), "b"] + ["b_tail"] * has_tail
    parameters = [*(f"{MAP_TYPE} {name}" for name in maps), *results]
    scalars = ["images", "n", "channels", "kernel_width", "rows", "columns"]
    names = [f.name for f in dataclasses.fields(ConvAxis)]
    axes = [f"h{i}" for i in range(len(rows))] + [f"w{i}" for i in range(len(columns))]
    walked = {axis: [f"{axis}_{name}" for name in names] for axis in axes}
    scalars += itertools.chain(*walked.values())
    parameters += [f"int {name}" for name in scalars]

    def braced(items: list[str]) -> str:
        return f"{{{', '.join(items)}}}"

    walks_of = {axis: braced(fields) for axis, fields in walked.items()}
    arguments = [
        braced([braced([f"&{name}" for name in line]) for line in of_phase]),
        "&b",
        "&b_tail" if has_tail else "nullptr",
        finish,
        *("images", "n", "channels", "kernel_width"),
        braced([text for axis, text in walks_of.items() if axis[0] == "h"]),
        braced([text for axis, text in walks_of.items() if axis[0] == "w"]),
    ]
    return ", ".join(parameters), ", ".join(arguments)
