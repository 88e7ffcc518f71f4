"""Reasons and rules that the CUDA GEMMs share.

Rules that depend on one kernel are in ``gemm_sm80`` and ``gemm_sm90_space``, the
callers together with ``gemm_sm90``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.problem import GemmProblem
from tracea_jax.variants.space import Rule, representative

EXACT_PRECISIONS = ("default", "high", "highest")  # differ only for float32 operands
MAX_BAND = 1024
INT32_MAX = 2**31 - 1
MOST_ROWS = INT32_MAX - 1023  # tile coordinates beyond the edge still fit int32

Formula = Callable[[GemmProblem, Any, CudaDevice], Any]  # of a config or columns


def refused_results(problem: GemmProblem, dtypes: Sequence[str]) -> Iterator[str]:
    """Why output, bias and residual cannot have their dtypes."""
    allowed = ", ".join(dtypes)
    if problem.out not in dtypes:
        yield f"output of dtype {problem.out}; it gives {allowed}"
    for role in ("bias", "residual"):
        dtype = getattr(problem.epilogue, f"{role}_dtype")
        if dtype not in (None, *dtypes):
            yield f"{role} of dtype {dtype}; it takes {allowed}"


def refused_extents(
    problem: GemmProblem, extents: Sequence[str], coordinates: str
) -> Iterator[str]:
    """Why extents of a problem are refused: one is 0 or too large.

    Args:
      problem: the problem.
      extents: names of the extents that must not be too large.
      coordinates: name of the numbers that address a tile's rows, for the message, such
        as "32-bit coordinates".
    """
    if min(problem.batch, problem.m, problem.n, problem.k) < 1:
        yield "an extent is 0, so there is nothing to multiply"
        return
    for extent in extents:
        value = getattr(problem, extent)
        if value > MOST_ROWS:
            yield f"{extent}={value} is above {MOST_ROWS}, what {coordinates} reach"


def idle_stages(fewest: int, read: Formula) -> Rule:
    """Refuses stages beyond the number that a block ever reads.

    Args:
      fewest: stages that are never refused.
      read: the stages of k that a block reads.
    """
    return Rule(
        code="idle_stages",
        refuses=lambda p, c, d: (c.stages > fewest) & (c.stages > read(p, c, d)),
        why=lambda p, c, d: f"a block never reads as much as {c.stages} stages hold",
    )


def repeated_raster(
    usual: int,
    bands: Sequence[int],
    tile_grid: Callable[[GemmProblem, Any], tuple[Any, Any, Any]],
    at_once: Formula,
) -> Rule:
    """Refuses a raster band if another band has the same effect.

    Bands have the same effect if they walk the tiles in the same order, or if all tiles
    run at once. Of such bands the usual one stays, else the lowest.

    Args:
      usual: the usual value of ``raster_band``.
      bands: all values of ``raster_band``.
      tile_grid: tiles along m, n and batch.
      at_once: whether all tiles run at the same time.
    """

    def refuses(p: GemmProblem, c: Any, d: CudaDevice) -> Any:
        m_tiles, n_tiles, _ = tile_grid(p, c)
        alike = (n_tiles == 1) | at_once(p, c, d)
        rows = np.where(alike, 1, m_tiles)
        first = representative(
            c.raster_band, (usual, *bands), lambda b: np.minimum(b, rows)
        )
        return first != c.raster_band

    return Rule(
        code="raster",
        refuses=refuses,
        why=lambda p, c, d: (
            f"raster_band={c.raster_band} runs as another band does, which stands for "
            "it"
        ),
    )
