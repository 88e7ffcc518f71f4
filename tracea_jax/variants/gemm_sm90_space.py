"""What gemm_sm90 may choose from: the grid, and the rules that make a config legal.

Rules and features are formulas over the fields of a config, which may be columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import GemmProblem
from tracea_jax.variants.space import Columns, Rule, grid, representative, survivors

CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 128, 192, 256),
    "consumers": (1, 2),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "wait_depth": (0, 1),
}
GRID: dict[str, tuple[int, ...]] = {
    "tile_m": CHOICES["tile_m"],
    "tile_n": CHOICES["tile_n"],
    "stages": tuple(range(2, emit.MAX_STAGES + 1)),
    "consumers": CHOICES["consumers"],
    "cluster_m": CHOICES["cluster_m"],
    "cluster_n": CHOICES["cluster_n"],
    "raster_band": (1, 2, 4, 8, 16, 32),
    "wait_depth": CHOICES["wait_depth"],
}
USUAL_BAND = GemmSm90Config(tile_m=64, tile_n=64, stages=2).raster_band
# Accumulators of each thread, by consumers; more leaves the epilogue too few registers.
_MAX_ACCUMULATORS = {1: 96, 2: 128}


def accumulator_limit(config: GemmSm90Config) -> Any:
    """Most f32 accumulators of a consumer thread."""
    return np.where(config.consumers == 1, *_MAX_ACCUMULATORS.values())


def slots(config: GemmSm90Config, device: CudaDevice) -> Any:
    """Clusters that run at the same time, if there are as many tiles."""
    return np.maximum(device.sm_count // config.cluster_size, 1)


def waves(problem: GemmProblem, config: GemmSm90Config, device: CudaDevice) -> Any:
    """Tiles that the busiest cluster computes one after another."""
    return -(-emit.tile_count(problem, config) // slots(config, device))


def steps(problem: GemmProblem) -> int:
    """Stages of k that each tile reads."""
    return -(-problem.k // emit.TILE_K)


def columns_of(
    problem: GemmProblem, device: CudaDevice, **choices: Sequence[int]
) -> tuple[Columns, dict[str, int]]:
    """The configs of a grid worth measuring, and how many were refused for what."""
    everything = grid(**choices)
    config = of_columns(everything)
    refusals = ((r.code, r.refuses(problem, config, device)) for r in (*LEGAL, *WORTH))
    alive, pruned = survivors(refusals)
    return {name: values[alive] for name, values in everything.items()}, pruned


def of_columns(columns: Columns) -> GemmSm90Config:
    """Columns in the place of a config's numbers; its properties are columns too."""
    fields: dict[str, Any] = columns
    return GemmSm90Config(**fields)


def derived(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Columns:
    """Features that say how a config fits the problem, for a surrogate model."""
    m_tiles, n_tiles, batch = emit.tile_grid(problem, config)
    rows, cols = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    rounds, places = waves(problem, config, device), slots(config, device)
    loaded = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    return {
        "log2_accumulators": np.log2(config.accumulators),
        "log2_smem_bytes": np.log2(emit.smem_bytes(config)),
        "wave_efficiency": m_tiles * n_tiles * batch / (rounds * places),
        "log2_padding": np.log2(
            m_tiles * rows / problem.m * n_tiles * cols / problem.n
        ),
        "log2_l2_bytes_per_mac": np.log2(loaded / (config.tile_m * config.tile_n)),
        "log2_k_steps": np.log2(rounds * steps(problem)),
    }


# ---- what the kernel can do ----------------------------------------------------------


def _splits_unevenly(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.tile_m % (emit.SLAB * c.consumers) != 0


def _holds_too_much(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.accumulators > accumulator_limit(c)


def _is_a_large_cluster(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.cluster_size > 2


def _does_not_fit(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return emit.smem_bytes(c) > d.smem_per_block_bytes


def _deadlocks(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.stages <= c.wait_depth


LEGAL = (
    Rule(
        code="rows",
        refuses=_splits_unevenly,
        why=lambda p, c, d: (
            f"tile_m={c.tile_m} must be a multiple of 64 for each of "
            f"{c.consumers} consumers"
        ),
    ),
    Rule(
        code="accumulators",
        refuses=_holds_too_much,
        why=lambda p, c, d: (
            f"a {c.tile_m}x{c.tile_n} tile needs {c.accumulators} accumulators a "
            f"thread with {c.consumers} consumers; at most {accumulator_limit(c)} fit"
        ),
    ),
    Rule(
        code="cluster",
        refuses=_is_a_large_cluster,
        why=lambda p, c, d: (
            "a cluster has at most 2 blocks: cluster_m * cluster_n <= 2"
        ),
    ),
    Rule(
        code="smem",
        refuses=_does_not_fit,
        why=lambda p, c, d: (
            f"stages={c.stages} of {c.tile_m}x{c.tile_n} tiles exceed "
            f"{d.smem_per_block_bytes} bytes of shared memory; at most "
            f"{emit.most_stages(c, d.smem_per_block_bytes)} fit"
        ),
    ),
    Rule(
        code="depth",
        refuses=_deadlocks,
        why=lambda p, c, d: (
            f"stages={c.stages} must exceed wait_depth={c.wait_depth}, or "
            "producer and consumers wait for each other"
        ),
    ),
)


# ---- what is worth measuring: of configs that do the same, one -----------------------


def _computes_only_padding(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """A smaller tile, or one block of the cluster, would hold all of the output."""
    wide_m = (c.tile_m > emit.SLAB) & (p.m <= c.tile_m // 2)
    wide_n = (c.tile_n > 64) & (p.n <= c.tile_n - 64)  # the next narrower tile
    lone_m = (c.cluster_m > 1) & (p.m <= c.tile_m)
    lone_n = (c.cluster_n > 1) & (p.n <= c.tile_n)
    return wide_m | wide_n | lone_m | lone_n


def _has_idle_stages(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """Fewer stages would already hold all that a block ever reads."""
    return (c.stages > 2) & (c.stages > waves(p, c, d) * steps(p))


def _repeats_a_raster(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """Another band walks the tiles in the same order, or all of them run at once.

    The usual band stands for those that are alike if it is one, else the lowest.
    """
    m_tiles, n_tiles, _ = emit.tile_grid(p, c)
    alike = (n_tiles == 1) | (waves(p, c, d) == 1)
    rows = np.where(alike, 1, m_tiles)
    bands = (USUAL_BAND, *GRID["raster_band"])
    usual = representative(c.raster_band, bands, lambda b: np.minimum(b, rows))
    return usual != c.raster_band


WORTH = (
    Rule(
        code="padding",
        refuses=_computes_only_padding,
        why=lambda p, c, d: (
            f"a {c.tile_m}x{c.tile_n} tile in clusters of {c.cluster_m}x{c.cluster_n} "
            f"is too large for the output, {p.m}x{p.n}"
        ),
    ),
    Rule(
        code="idle_stages",
        refuses=_has_idle_stages,
        why=lambda p, c, d: f"a block never reads as much as {c.stages} stages hold",
    ),
    Rule(
        code="raster",
        refuses=_repeats_a_raster,
        why=lambda p, c, d: (
            f"raster_band={c.raster_band} makes no difference here: another stands "
            "for it"
        ),
    ),
)
