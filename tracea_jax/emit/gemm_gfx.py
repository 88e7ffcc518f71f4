"""gemm_gfx as text: the portable GEMM in HIP, for the matrix cores of AMD GPUs.

The template is ``kernels/hip/gemm_gfx.hpp``; what is derived of a problem and a config
comes from ``emit.gemm_sm80``, of which this is the sibling. In shared memory k runs
along rows for both operands.
"""

from __future__ import annotations

from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.gemm_sm80 import (
    GemmSm80Config,
    lhs_tiles,
    params,
    rhs_tiles,
    signature,
    tile_count,
)
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.targets import Target, ring_bytes
from tracea_jax.ir.operands import operand_swizzle
from tracea_jax.problem import ITEMSIZE, GemmProblem

_CORE = {"MFMA": "Mfma", "WMMA": "Wmma"}


def kernel(problem: GemmProblem, config: GemmSm80Config, target: Target) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands and results are those of ``gemm_sm80.kernel``. Shared memory is declared by
    the kernel, so that the launch asks for none.
    """
    return Kernel(
        entry=entry_name(problem, config, target),
        source=_source(problem, config, target),
        headers=sources.headers("gemm_gfx.hpp", dialect="hip"),
        arch=target.name,
        grid=(tile_count(problem, config), 1, 1),
        block=(target.threads(config), 1, 1),
        smem_bytes=0,
        params=params(problem),
    )


def entry_name(problem: GemmProblem, config: GemmSm80Config, target: Target) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on shapes."""
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    aligned = f"v{left.align_bytes}x{right.align_bytes}"
    types = f"{SHORT[problem.lhs]}_{SHORT[problem.out]}_{problem.layout}"
    steps = epilogues.name_parts(problem.epilogue)
    choices = str(config).replace(" ", "_")
    instruction = target.instruction.lower()
    return "_".join(("gemm_gfx", instruction, types, *steps, aligned, choices))


def _source(problem: GemmProblem, config: GemmSm80Config, target: Target) -> str:
    """The translation unit: Traits and one entry."""
    trans_a, trans_b = (cxx(side == "t") for side in problem.layout)
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    itemsize = ITEMSIZE[problem.lhs]
    swizzle = operand_swizzle(config.tile_k * itemsize, itemsize, mn_major=False).cxx()
    types = f"{problem.lhs} -> {problem.out} {problem.layout}"
    element = CXX_TYPE[problem.lhs]
    threads = target.threads(config)
    parameters, arguments = signature(problem)
    return f"""\
// gemm_gfx | {types}, epilogue {problem.epilogue} | {config} | {target.instruction}
#include "gemm_gfx.hpp"

namespace {{
struct Traits {{
  using Element = {element};
  using MatrixCore = tracea::{_CORE[target.instruction]}<{element}>;
  using SwizzleA = {swizzle};
  using SwizzleB = {swizzle};
  static constexpr bool kTransA = {trans_a}, kTransB = {trans_b};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kTileK = {config.tile_k};
  static constexpr int kWarpsM = {config.warps_m}, kWarpsN = {config.warps_n}, \
kStages = {config.stages}, kRasterBand = {config.raster_band};
  static constexpr int kAlignA = {left.align_bytes}, kAlignB = {right.align_bytes};
  static constexpr int kThreads = {threads}, \
kSmemBytes = {ring_bytes(problem, config, target)};
{epilogues.traits(problem)}
}};
}}  // namespace

extern "C" __global__ void GFX_BLOCK_SIZE({threads})
{entry_name(problem, config, target)}({parameters}) {{
  __shared__ tracea::GemmGfxShared<Traits> shared;
  tracea::gemm_gfx<Traits>({{{arguments}}}, shared);
}}
"""
