"""gemm_sm80 as text: everything that follows from a problem and a config.

A config holds the free choices. Swizzles, shared memory, threads, grid and parameters
are derived here by pure functions; the generated Traits carry them to the device code,
which asserts that it arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.ir.operands import BLOCK, STEP_BYTES, operand_swizzle
from tracea_jax.ir.swizzle import Swizzle
from tracea_jax.problem import ITEMSIZE, GemmProblem

DTYPES = ("bfloat16", "float16", "float32")  # of operands; float32 as TF32
OUT_DTYPES = tuple(CXX_TYPE)
WIDEST_COPY_BYTES = 16
_LEAST_COPY_BYTES = 4
WARP = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSm80Config:
    """The free choices of gemm_sm80.

    Attributes:
      tile_m, tile_n: rows and columns of the output that one block computes.
      tile_k: depth of one stage, in elements.
      warps_m, warps_n: how the warps of a block split the tile.
      stages: depth of the ring of operand tiles.
      raster_band: rows of tiles of one band of the tile order.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    stages: int
    raster_band: int = 8

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    @property
    def warp_tile_m(self) -> int:
        """Rows of the tile that one warp multiplies."""
        return self.tile_m // self.warps_m

    @property
    def warp_tile_n(self) -> int:
        """Columns of the tile that one warp multiplies."""
        return self.tile_n // self.warps_n

    @property
    def accumulators(self) -> int:
        """f32 registers of each thread."""
        return self.tile_m * self.tile_n // self.threads

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k} "
            f"w{self.warps_m}x{self.warps_n} s{self.stages} r{self.raster_band}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandTiles:
    """One operand's tiles in shared memory, and how they are copied there.

    Attributes:
      mn_major: whether rows run along m or n, else along k.
      rows: of a tile.
      row_bytes: of a tile.
      swizzle: of its bytes.
      align_bytes: what every row of the matrix is a multiple of: 16, 8, 4 or 2.
    """

    mn_major: bool
    rows: int
    row_bytes: int
    swizzle: Swizzle
    align_bytes: int

    @property
    def unit_bytes(self) -> int:
        """Bytes that one copy writes."""
        return max(self.align_bytes, _LEAST_COPY_BYTES)


def lhs_tiles(problem: GemmProblem, config: GemmSm80Config) -> OperandTiles:
    mn_major = problem.layout[0] == "t"
    row = problem.m if mn_major else problem.k
    return _operand_tiles(problem, config, config.tile_m, mn_major, row)


def rhs_tiles(problem: GemmProblem, config: GemmSm80Config) -> OperandTiles:
    mn_major = problem.layout[1] == "n"
    row = problem.n if mn_major else problem.k
    return _operand_tiles(problem, config, config.tile_n, mn_major, row)


def _operand_tiles(
    problem: GemmProblem, config: GemmSm80Config, extent: int, mn_major: bool, row: int
) -> OperandTiles:
    itemsize = ITEMSIZE[problem.lhs]
    rows, columns = (config.tile_k, extent) if mn_major else (extent, config.tile_k)
    return OperandTiles(
        mn_major=mn_major,
        rows=rows,
        row_bytes=columns * itemsize,
        swizzle=operand_swizzle(columns * itemsize, itemsize, mn_major=mn_major),
        align_bytes=align_bytes(row, itemsize),
    )


def align_bytes(row: int, itemsize: int) -> int:
    """The largest copy that rows of so many elements are multiples of."""
    return math.gcd(row * itemsize, WIDEST_COPY_BYTES)


def pairs(problem: GemmProblem) -> bool:
    """Returns whether two neighbouring columns of the results can be stored at once."""
    return problem.n % 2 == 0


def smem_bytes(problem: GemmProblem, config: GemmSm80Config) -> int:
    """Shared memory of one block: the ring."""
    rows = config.tile_m + config.tile_n
    return config.stages * rows * config.tile_k * ITEMSIZE[problem.lhs]


def most_stages(problem: GemmProblem, config: GemmSm80Config, limit_bytes: int) -> int:
    """The deepest ring that fits."""
    stage = smem_bytes(problem, dataclasses.replace(config, stages=1))
    return limit_bytes // stage


def copies(problem: GemmProblem, config: GemmSm80Config) -> Any:
    """Copies of each thread for one stage."""
    row_bytes = config.tile_k * ITEMSIZE[problem.lhs]
    units = sum(
        tile * row_bytes // max(align, _LEAST_COPY_BYTES)
        for tile, align in _sides(problem, config)
    )
    return units // config.threads


def staged_registers(problem: GemmProblem, config: GemmSm80Config) -> Any:
    """Elements that a thread holds on their way, of rows that cp.async cannot copy."""
    itemsize = ITEMSIZE[problem.lhs]
    elements = sum(
        tile * config.tile_k // config.threads
        for tile, align in _sides(problem, config)
        if align < _LEAST_COPY_BYTES
    )
    steps = config.tile_k * itemsize // STEP_BYTES
    return elements // np.maximum(steps - 1, 1)  # a stage is copied in parts


def staged_elements(problem: GemmProblem, config: GemmSm80Config, threads: int) -> Any:
    """Registers in which a thread holds its part of a stage, where all pass through.

    Elements of odd rows take one each.
    """
    row_bytes = config.tile_k * ITEMSIZE[problem.lhs]
    return sum(
        tile * row_bytes // min(align, _LEAST_COPY_BYTES) // threads
        for tile, align in _sides(problem, config)
    )


def _sides(
    problem: GemmProblem, config: GemmSm80Config
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(side of the tile, what rows are multiples of in bytes) of each operand."""
    left, right = problem.layout
    itemsize = ITEMSIZE[problem.lhs]
    lhs = align_bytes(problem.m if left == "t" else problem.k, itemsize)
    rhs = align_bytes(problem.k if right == "t" else problem.n, itemsize)
    return (config.tile_m, lhs), (config.tile_n, rhs)


def tile_grid(problem: GemmProblem, config: GemmSm80Config) -> tuple[int, int, int]:
    """Tiles along m, n and batch; the last ones may hang over the edge."""
    m_tiles = -(-problem.m // config.tile_m)
    return m_tiles, -(-problem.n // config.tile_n), problem.batch


def tile_count(problem: GemmProblem, config: GemmSm80Config) -> int:
    """Tiles, and blocks, in all batches."""
    m_tiles, n_tiles, batch = tile_grid(problem, config)
    return m_tiles * n_tiles * batch


def kernel(problem: GemmProblem, config: GemmSm80Config, device: CudaDevice) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are lhs, rhs, then bias and residual if the epilogue has them; the results
    are the output, then the preactivation if it is saved. Everything that only the
    launch needs stays out of the source: one cubin serves all shapes of one alignment.
    """
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config),
        headers=sources.headers("gemm_sm80.cuh"),
        arch=device.arch,
        grid=(tile_count(problem, config), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem_bytes(problem, config),
        params=params(problem),
    )


def entry_name(problem: GemmProblem, config: GemmSm80Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on shapes.

    ``v16x8x2``: rows of the left operand are multiples of 16 bytes, of the right one of
    8, and of the results of 2 elements.
    """
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    aligned = f"v{left.align_bytes}x{right.align_bytes}x{1 + pairs(problem)}"
    types = f"{SHORT[problem.lhs]}_{SHORT[problem.out]}_{problem.layout}"
    steps = epilogues.name_parts(problem.epilogue)
    choices = str(config).replace(" ", "_")
    return "_".join(("gemm_sm80", types, *steps, aligned, choices))


def params(problem: GemmProblem) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``signature``."""
    epilogue = problem.epilogue
    inputs = 2 + epilogues.has_bias(epilogue) + epilogue.residual
    results = 1 + epilogue.save_preactivation
    scalars = (problem.m, problem.n, problem.k)
    batched = (int(problem.lhs_batched), int(problem.rhs_batched))
    return (
        *(Pointer(operand=i) for i in range(inputs + results)),
        *(Scalar(value=v) for v in (*scalars, *batched)),
    )


def signature(problem: GemmProblem) -> tuple[str, str]:
    """Parameters of the entry, and the fields of the kernel's Params, of them."""
    epilogue = problem.epilogue
    inputs = ["a", "b", *["bias"] * epilogues.has_bias(epilogue)]
    inputs += ["residual"] * epilogue.residual
    results = ["out", *["z"] * epilogue.save_preactivation]
    scalars = ["m", "n", "k", "a_batched", "b_batched"]
    parameters = [f"const void* {name}" for name in inputs]
    parameters += [f"void* {name}" for name in results]
    parameters += [f"int {name}" for name in scalars]
    z, bias, residual = (
        name if name in inputs + results else "nullptr"
        for name in ("z", "bias", "residual")
    )
    finish = f"{{out, {z}, {bias}, {residual}, m, n}}"
    return ", ".join(parameters), f"a, b, {finish}, {', '.join(scalars)}"


def tile_traits(problem: GemmProblem, config: GemmSm80Config) -> str:
    """The members of Traits that ``tile/mma_tile.cuh`` asks for, one to a line."""
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    of_type = "static constexpr"
    lines = (
        f"using Element = {CXX_TYPE[problem.lhs]};",
        f"using SwizzleA = {left.swizzle.cxx()};",
        f"using SwizzleB = {right.swizzle.cxx()};",
        f"{of_type} bool kMnMajorA = {cxx(left.mn_major)}, "
        f"kMnMajorB = {cxx(right.mn_major)};",
        f"{of_type} int kTileM = {config.tile_m}, kTileN = {config.tile_n}, "
        f"kTileK = {config.tile_k};",
        f"{of_type} int kWarpsM = {config.warps_m}, kWarpsN = {config.warps_n}, "
        f"kStages = {config.stages}, kRasterBand = {config.raster_band};",
        f"{of_type} int kThreads = {config.threads}, "
        f"kSmemBytes = {smem_bytes(problem, config)};",
    )
    return "\n".join(f"  {line}" for line in lines)


def _source(problem: GemmProblem, config: GemmSm80Config) -> str:
    """The translation unit: Traits and one entry."""
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    types = f"{problem.lhs} -> {problem.out} {problem.layout}"
    parameters, arguments = signature(problem)
    return f"""\
// gemm_sm80 | {types}, epilogue {problem.epilogue} | {config}
#include "gemm_sm80.cuh"

namespace {{
struct Traits {{
{tile_traits(problem, config)}
  static constexpr int kAlignA = {left.align_bytes}, kAlignB = {right.align_bytes};
  static constexpr bool kPairs = {cxx(pairs(problem))};
{epilogues.traits(problem)}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({parameters}) {{
  tracea::gemm_sm80<Traits>({{{arguments}}});
}}
"""


__all__ = [
    "BLOCK",
    "DTYPES",
    "OUT_DTYPES",
    "WARP",
    "WIDEST_COPY_BYTES",
    "GemmSm80Config",
    "OperandTiles",
    "align_bytes",
    "copies",
    "entry_name",
    "kernel",
    "lhs_tiles",
    "most_stages",
    "pairs",
    "params",
    "rhs_tiles",
    "signature",
    "smem_bytes",
    "staged_elements",
    "staged_registers",
    "tile_count",
    "tile_grid",
    "tile_traits",
]
