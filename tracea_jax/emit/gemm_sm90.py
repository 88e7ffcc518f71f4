"""gemm_sm90 as text: everything that follows from a problem and a config.

A config holds the free choices. Shared memory, threads, grid, tensor maps and
parameters are derived here by pure functions; the generated Traits carry them to the
device code, which asserts that it arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import PTX_TYPE, Wgmma
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, GemmProblem

TILE_K = 64  # one 128-byte row of 16-bit elements: the widest swizzled box
ROW_BYTES = 128
SLAB = 64  # rows of one wgmma; also elements of one row of an m- or n-major tile
WARPGROUP = 128
MAX_STAGES = 12
SUBTILE_BYTES = SLAB * ROW_BYTES  # of the output, in shared memory

_CXX_TYPE = {"bfloat16": "tracea::bf16", "float16": "tracea::f16", "float32": "float"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_ACTIVATION = {
    "none": "kNone",
    "relu": "kRelu",
    "gelu": "kGelu",
    "gelu_exact": "kGeluExact",
    "silu": "kSilu",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSm90Config:
    """The free choices of gemm_sm90.

    Attributes:
      tile_m, tile_n: rows and columns of the output that one block computes at a time.
      stages: depth of the ring of operand tiles, each 64 deep in k.
      consumers: warpgroups that multiply; they split the rows of the tile.
      cluster_m, cluster_n: blocks that share operand copies, along m or n.
      raster_band: rows of clusters of one band of the tile order.
      wait_depth: batches of wgmma that stay in flight while the next one is issued.
    """

    tile_m: int
    tile_n: int
    stages: int
    consumers: int = 2
    cluster_m: int = 1
    cluster_n: int = 1
    raster_band: int = 8
    wait_depth: int = 1

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def slabs(self) -> int:
        """64-row slabs of each consumer."""
        return self.tile_m // (SLAB * self.consumers)

    @property
    def accumulators(self) -> int:
        """f32 registers of each consumer thread."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.consumers)

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n}x{TILE_K} s{self.stages} w{self.consumers} "
            f"c{self.cluster_m}x{self.cluster_n} r{self.raster_band} d{self.wait_depth}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Shared memory of one block, in the order of ``GemmSm90Shared``.

    Attributes:
      epilogue_buffers: staging sub-tiles of each consumer.
      smem_bytes: the whole, a multiple of the swizzle's period.
    """

    epilogue_buffers: int
    smem_bytes: int


def storage(problem: GemmProblem, config: GemmSm90Config, limit_bytes: int) -> Storage:
    """The layout with as many staging buffers as fit, from 2 to one for every store.

    The result of two buffers may exceed the limit; then the config is not legal.
    """
    saves = 1 + problem.epilogue.save_preactivation
    columns = ROW_BYTES // ITEMSIZE[problem.out]
    stores = saves * config.slabs * config.tile_n // columns
    counts = range(max(stores, 2), 2, -1)
    fitting = (b for b in counts if smem_bytes(config, b) <= limit_bytes)
    buffers = next(fitting, 2)
    return Storage(epilogue_buffers=buffers, smem_bytes=smem_bytes(config, buffers))


def smem_bytes(config: GemmSm90Config, epilogue_buffers: int = 2) -> int:
    """Shared memory of one block; without a count, the least that the kernel needs."""
    ring = config.stages * (config.tile_m + config.tile_n) * ROW_BYTES
    staging = config.consumers * epilogue_buffers * SUBTILE_BYTES
    bias = 4 * config.consumers * config.tile_n
    barriers = 2 * 8 * config.stages
    period = SWIZZLE_128B.period_bytes
    return -(-(ring + staging + bias + barriers) // period) * period


def most_stages(config: GemmSm90Config, limit_bytes: int) -> int:
    """The deepest ring that fits beside two staging buffers; 0 if none does."""
    rings = (dataclasses.replace(config, stages=s) for s in range(1, MAX_STAGES + 1))
    fitting = (r.stages for r in rings if smem_bytes(r) <= limit_bytes)
    return max(fitting, default=0)


def registers(config: GemmSm90Config) -> tuple[int, int]:
    """setmaxnreg of producer and consumers; zeros leave the launch's budget alone.

    One consumer starts with all it can have; two take what the producer gives back.
    """
    return (40, 232) if config.consumers == 2 else (0, 0)


def tile_grid(problem: GemmProblem, config: GemmSm90Config) -> tuple[int, int, int]:
    """Clusters' tiles along m, n and batch; the last ones may hang over the edge."""
    return (
        -(-problem.m // (config.tile_m * config.cluster_m)),
        -(-problem.n // (config.tile_n * config.cluster_n)),
        problem.batch,
    )


def tile_count(problem: GemmProblem, config: GemmSm90Config) -> int:
    """Tiles of clusters in all batches."""
    m_tiles, n_tiles, batch = tile_grid(problem, config)
    return m_tiles * n_tiles * batch


def grid(problem: GemmProblem, config: GemmSm90Config, sm_count: int) -> int:
    """Blocks of the persistent launch: whole clusters, no more than fit."""
    size = config.cluster_size
    return size * max(1, min(tile_count(problem, config), sm_count // size))


def raster(tile: int, m_tiles: int, n_tiles: int, band: int) -> tuple[int, int, int]:
    """(m, n, batch) of the tile of this number; see kernels/cuda/tile/scheduler.cuh."""
    batch, local = divmod(tile, m_tiles * n_tiles)
    first, in_band = divmod(local, band * n_tiles)
    height = min(band, m_tiles - first * band)
    n, m = divmod(in_band, height)
    return first * band + m, n, batch


def box_rows(extent: int, mn_major: bool, parts: int) -> int:
    """Rows of 128 bytes in one copy of an operand tile that ``parts`` blocks share."""
    if not mn_major:
        return extent // parts
    return TILE_K if extent // SLAB % parts == 0 else TILE_K // parts


def kernel(problem: GemmProblem, config: GemmSm90Config, device: CudaDevice) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are lhs, rhs, then bias and residual if the epilogue has them; the results
    are the output, then the preactivation if it is saved. Everything that only the
    launch needs (m, n, k, batch, which operands are batched) stays out of the source:
    one cubin serves all shapes.
    """
    wgmma = Wgmma(n=config.tile_n, dtype=problem.lhs)
    headers = sources.headers("gemm_sm90.cuh")
    layout = storage(problem, config, device.smem_per_block_bytes)
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, layout, wgmma),
        headers=tuple(sorted((*headers, (wgmma.header_name, wgmma.header)))),
        arch=device.arch,
        grid=(grid(problem, config, device.sm_count), 1, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster_size, 1, 1),
        smem_bytes=layout.smem_bytes,
        params=_params(problem, config),
    )


def entry_name(problem: GemmProblem, config: GemmSm90Config) -> str:
    """What the kernel computes and how, readable in a profiler; free of shapes."""
    epilogue = problem.epilogue
    joined = {"add": "res", "multiply": "mul"}[epilogue.residual_op]
    steps = (
        {"none": "", "row": "bias", "batched_row": "bbias"}[epilogue.bias]
        + _SHORT.get(epilogue.bias_dtype or "", ""),
        "" if epilogue.activation == "none" else epilogue.activation,
        f"{joined}{_SHORT.get(epilogue.residual_dtype or '', '')}" * epilogue.residual,
        "z" if epilogue.save_preactivation else "",
    )
    choices = str(config).replace(" ", "_")
    types = f"{_SHORT[problem.lhs]}_{_SHORT[problem.out]}_{problem.layout}"
    return "_".join(("gemm_sm90", types, *filter(None, steps), choices))


def _has_bias(problem: GemmProblem) -> bool:
    return problem.epilogue.bias != "none"


def _params(problem: GemmProblem, config: GemmSm90Config) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_signature``."""
    epilogue = problem.epilogue
    bias, residual = 2, 2 + _has_bias(problem)
    out = residual + epilogue.residual
    results = (out, out + 1) if epilogue.save_preactivation else (out,)
    params: list[Param] = [_lhs_map(problem, config), _rhs_map(problem, config)]
    params += [_result_map(problem, operand) for operand in results]
    if _has_bias(problem):
        params.append(Pointer(operand=bias))
    if epilogue.residual:
        params.append(Pointer(operand=residual))
    sizes = (problem.m, problem.n, problem.k, problem.batch)
    batched = (int(problem.lhs_batched), int(problem.rhs_batched))
    return (*params, *(Scalar(value=v) for v in (*sizes, *batched)))


def _lhs_map(problem: GemmProblem, config: GemmSm90Config) -> TensorMap:
    transposed = problem.layout[0] == "t"
    return _operand_map(
        0,
        problem.lhs,
        (problem.m, problem.k) if transposed else (problem.k, problem.m),
        problem.batch if problem.lhs_batched else 1,
        box_rows(config.tile_m, transposed, config.cluster_n),
    )


def _rhs_map(problem: GemmProblem, config: GemmSm90Config) -> TensorMap:
    transposed = problem.layout[1] == "t"
    return _operand_map(
        1,
        problem.rhs,
        (problem.k, problem.n) if transposed else (problem.n, problem.k),
        problem.batch if problem.rhs_batched else 1,
        box_rows(config.tile_n, not transposed, config.cluster_m),
    )


def _result_map(problem: GemmProblem, operand: int) -> TensorMap:
    return _operand_map(
        operand, problem.out, (problem.n, problem.m), problem.batch, rows=SLAB
    )


def _operand_map(
    operand: int, dtype: str, matrix: tuple[int, int], batch: int, rows: int
) -> TensorMap:
    """Boxes of ``rows`` rows of 128 bytes of a batch of row-major matrices.

    The batch is a dimension of its own: a box that leaves its matrix meets zeros and
    not the next matrix.
    """
    itemsize = ITEMSIZE[dtype]
    columns, height = matrix
    return TensorMap(
        operand=operand,
        dtype=dtype,
        dims=(columns, height, batch),
        strides=(columns * itemsize, columns * height * itemsize),
        box=(ROW_BYTES // itemsize, rows, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _source(
    problem: GemmProblem, config: GemmSm90Config, layout: Storage, wgmma: Wgmma
) -> str:
    """The translation unit: Traits and one entry."""
    trans_a, trans_b = (side == "t" for side in problem.layout)
    epilogue = problem.epilogue
    producer, consumer = registers(config)
    ring = Ring(stages=config.stages)
    arrivals = ring.empty_arrivals(
        consumers=config.consumers, cluster=config.cluster_size
    )
    rows_a = box_rows(config.tile_m, trans_a, config.cluster_n)
    rows_b = box_rows(config.tile_n, not trans_b, config.cluster_m)
    types = f"{problem.lhs} -> {problem.out} {problem.layout}"
    signature, arguments = _signature(problem)
    return f"""\
// gemm_sm90 | {types}, epilogue {epilogue} | {config}
#include "gemm_sm90.cuh"
#include "{wgmma.header_name}"

namespace {{
struct Traits {{
  using ElementOut = {_CXX_TYPE[problem.out]};
  using ElementBias = {_CXX_TYPE[epilogue.bias_dtype or problem.out]};
  using ElementResidual = {_CXX_TYPE[epilogue.residual_dtype or problem.out]};
  using Mma = tracea::{wgmma.type_name}<{int(trans_a)}, {int(not trans_b)}>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kTransA = {_cxx(trans_a)}, kTransB = {_cxx(trans_b)};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kSlabs = {config.slabs}, kConsumers = {config.consumers};
  static constexpr int kStages = {config.stages}, kWaitDepth = {config.wait_depth}, \
kRasterBand = {config.raster_band};
  static constexpr int kClusterM = {config.cluster_m}, kClusterN = {config.cluster_n}, \
kBoxRowsA = {rows_a}, kBoxRowsB = {rows_b};
  static constexpr unsigned kFirstEmptyParity = {ring.producer_parity(0)}, \
kEmptyArrivals = {arrivals};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kEpilogueBuffers = {layout.epilogue_buffers}, \
kSmemBytes = {layout.smem_bytes};
  static constexpr bool kHasBias = {_cxx(_has_bias(problem))}, \
kBiasIsBatched = {_cxx(epilogue.bias == "batched_row")};
  static constexpr bool kHasResidual = {_cxx(epilogue.residual)}, \
kMultipliesResidual = {_cxx(epilogue.residual_op == "multiply")}, \
kSavesPreactivation = {_cxx(epilogue.save_preactivation)};
  static constexpr auto kActivation = \
tracea::Activation::{_ACTIVATION[epilogue.activation]};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({signature}) {{
  tracea::gemm_sm90<Traits>({{{arguments}}});
}}
"""


def _signature(problem: GemmProblem) -> tuple[str, str]:
    """Parameters of the entry, and the fields of ``GemmSm90Params`` made of them."""
    epilogue = problem.epilogue
    maps = ["a", "b", "out"] + ["z"] * epilogue.save_preactivation
    pointers = ["bias"] * _has_bias(problem) + ["residual"] * epilogue.residual
    scalars = ["m", "n", "k", "batch", "a_batched", "b_batched"]
    parameters = [f"const __grid_constant__ tracea::TensorMap {name}" for name in maps]
    parameters += [f"const void* {name}" for name in pointers]
    parameters += [f"int {name}" for name in scalars]
    z = "&z" if epilogue.save_preactivation else "nullptr"
    bias, residual = (
        name if name in pointers else "nullptr" for name in ("bias", "residual")
    )
    finish = f"{{&out, {z}, {bias}, {residual}, m, n}}"
    return ", ".join(parameters), f"&a, &b, {finish}, {', '.join(scalars)}"


def _cxx(value: bool) -> str:
    return "true" if value else "false"


DTYPES = tuple(PTX_TYPE)
OUT_DTYPES = tuple(_CXX_TYPE)
