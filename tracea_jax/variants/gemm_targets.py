"""The portable GEMM on GPUs that nothing is launched on: what it takes there.

The reasons that refuse problems and configs, and the config to use; the texts are
written by ``emit.gemm_gfx`` and ``emit.gemm_metal``. No variant of an op, as no program
can run it: callers are ``doctor``, which shows it as such, and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracea_jax.emit import gemm_gfx, gemm_metal
from tracea_jax.emit.gemm_sm80 import (
    BLOCK,
    OUT_DTYPES,
    WIDEST_COPY_BYTES,
    GemmSm80Config,
    staged_elements,
    tile_count,
)
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.targets import Target, ring_bytes
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants.cuda_gemm import (
    EXACT_PRECISIONS,
    INT32_MAX,
    MAX_BAND,
    refused_extents,
    refused_results,
)
from tracea_jax.variants.gemm_sm80 import CHOICES
from tracea_jax.variants.space import check_choices, check_ranges

_RANGES = {"stages": (2, 4), "raster_band": (1, MAX_BAND)}
_ROW_BYTES = 64  # of a tile along k, of the configs below
_TILES = ((128, 128, 2, 4), (64, 64, 2, 2), (32, 32, 1, 2))  # tile_m, tile_n, warps
# A thread runs out of registers if its accumulators, and the elements of the next stage
# that it holds, are more than this together.
_MOST_REGISTERS = {"MFMA": 192, "WMMA": 96, "simdgroup_matrix": 96}


def reasons(problem: GemmProblem, target: Target) -> tuple[str, ...]:
    """Every sentence why the problem has no kernel there; empty if it has one."""
    return tuple(_reasons(problem, target))


def check(problem: GemmProblem, config: GemmSm80Config, target: Target) -> None:
    """Raises ValueError if the config is not legal for this problem."""
    check_choices(config, CHOICES)
    check_ranges(config, _RANGES)
    if refusal := next(_refusals(problem, config, target), None):
        raise ValueError(refusal)


def config(problem: GemmProblem, target: Target) -> GemmSm80Config:
    """The config to use: the largest tiles that are no larger than the output.

    Nothing was measured on such a GPU.

    Raises:
      ValueError: the problem has no kernel there.
    """
    if refusal := next(_reasons(problem, target), None):
        raise ValueError(f"{problem} on {target}: {refusal}")
    legal = [
        choice
        for tile_m, tile_n, warps_m, warps_n in _TILES
        if not any(
            _refusals(
                problem,
                choice := GemmSm80Config(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    tile_k=_ROW_BYTES // ITEMSIZE[problem.lhs],
                    warps_m=warps_m,
                    warps_n=warps_n,
                    stages=2,
                ),
                target,
            )
        )
    ]
    fitting = (c for c in legal if c.tile_m <= problem.m and c.tile_n <= problem.n)
    return next(fitting, legal[-1])


def kernel(
    problem: GemmProblem, target: Target, config_: GemmSm80Config | None = None
) -> Kernel:
    """The text of the kernel, in the dialect of the target.

    Args:
      problem: what it computes.
      target: the GPU it is for.
      config_: the config; None takes ``config``.

    Raises:
      ValueError: the problem has no kernel there, or the config is not legal.
    """
    chosen = config(problem, target) if config_ is None else config_
    check(problem, chosen, target)
    emit = gemm_metal if target.dialect == "metal" else gemm_gfx
    return emit.kernel(problem, chosen, target)


def _reasons(problem: GemmProblem, target: Target) -> Iterator[str]:
    if problem.lhs != problem.rhs:
        yield f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
    elif problem.lhs not in target.dtypes:
        yield (
            f"operands of dtype {problem.lhs}; {target.instruction} takes "
            f"{', '.join(target.dtypes)}"
        )
    yield from refused_results(problem, OUT_DTYPES)
    if problem.epilogue.is_derivative or problem.epilogue.column_sums:
        yield "its epilogue computes no derivatives and no sums of columns"
    if problem.precision not in EXACT_PRECISIONS:
        yield f"precision {problem.precision} names an algorithm only XLA has"
    yield from refused_extents(problem, ("m", "n", "k"), "32-bit coordinates")
    smallest = GemmSm80Config(
        tile_m=32, tile_n=32, tile_k=16, warps_m=1, warps_n=1, stages=2
    )
    if tile_count(problem, smallest) > INT32_MAX:
        yield "the output has more than 2^31 - 1 tiles of 32 x 32"


def _refusals(
    problem: GemmProblem, config: GemmSm80Config, target: Target
) -> Iterator[str]:
    c, threads = config, target.threads(config)
    row_bytes = c.tile_k * ITEMSIZE[problem.lhs]
    if row_bytes not in (_ROW_BYTES, 2 * _ROW_BYTES):
        yield f"tile_k={c.tile_k} is {row_bytes} bytes of {problem.lhs}; 64 or 128 fit"
    if min(c.warp_tile_m, c.warp_tile_n) < BLOCK:
        yield (
            f"{c.warps_m}x{c.warps_n} warps split a {c.tile_m}x{c.tile_n} tile into "
            f"{c.warp_tile_m}x{c.warp_tile_n}; no side may be less than {BLOCK}"
        )
    if min(c.tile_m, c.tile_n) * row_bytes < threads * WIDEST_COPY_BYTES:
        yield (
            f"{threads} threads have no 16 bytes each to copy of a side of "
            f"{min(c.tile_m, c.tile_n)}; use fewer warps"
        )
    if (smem := ring_bytes(problem, c, target)) > target.shared_bytes:
        yield f"{smem} bytes of shared memory; {target.name} has {target.shared_bytes}"
    held = c.tile_m * c.tile_n // threads + staged_elements(problem, c, threads)
    if held > (most := _MOST_REGISTERS[target.instruction]):
        yield (
            f"a thread holds {held} accumulators and registers of the next stage; "
            f"above {most} they spill; use more warps or a smaller tile"
        )
