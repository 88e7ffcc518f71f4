"""The space of gemm_sm90: the grid of configs, and the rules that refuse configs.

Rules and features are formulas over the fields of a config, which may be columns. Rules
shared with other kernels are in ``cuda_gemm``, times in ``gemm_sm90_model``. Callers:
``gemm_sm90`` and ``gemm_sm90_model``, benchmarks/fit_model and observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants.cuda_gemm import idle_stages, repeated_raster
from tracea_jax.variants.space import (
    Columns,
    Rule,
    as_config,
    grid,
    legal_columns,
    where,
)

CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 128, 160, 192, 224, 256),
    "consumers": (1, 2),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "cluster_k": (1, 2, 4),
    "wait_depth": (0, 1),
    "ping_pong": (False, True),
}
GRID: dict[str, tuple[int, ...]] = {
    "tile_m": CHOICES["tile_m"],
    "tile_n": CHOICES["tile_n"],
    "stages": tuple(range(2, emit.MAX_STAGES + 1)),
    "consumers": CHOICES["consumers"],
    "cluster_m": CHOICES["cluster_m"],
    "cluster_n": CHOICES["cluster_n"],
    "cluster_k": CHOICES["cluster_k"],
    "raster_band": (1, 2, 4, 8, 16, 32),
    "wait_depth": CHOICES["wait_depth"],
    "ping_pong": CHOICES["ping_pong"],
}
USUAL_BAND = GemmSm90Config(tile_m=64, tile_n=64, stages=2).raster_band
_MAX_ACCUMULATORS = 160  # of each thread; more leave the epilogue too few registers
_FEW_ACCUMULATORS = 64  # with fewer, loading the operands takes most of a tile's time
_WORTH_SHARING = 0.08  # part of the busiest block's steps that sharing must save


def accumulator_limit(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """Most f32 accumulators of a consumer thread.

    Half as many if operands have several parts, as their totals need registers, too.
    """
    most = where(config.ping_pong, _MAX_ACCUMULATORS, emit.USUAL_ACCUMULATORS)
    return most // (2 if emit.parts(problem) > 1 else 1)


def places(problem: GemmProblem, config: GemmSm90Config, device: CudaDevice) -> Any:
    """Tiles that the grid computes at the same time, without shared tiles."""
    resident = emit.resident_clusters(config, device.sm_count)
    clusters = np.minimum(emit.tile_count(problem, config), resident)
    return clusters * config.cluster_k


def whole_tiles(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Any:
    """Tiles of which the busiest block sums all of k."""
    tiles, at_once = emit.tile_count(problem, config), places(problem, config, device)
    return where(config.cluster_k > 1, tiles // at_once, -(-tiles // at_once))


def shared_tiles(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Any:
    """Tiles of the last round, which the blocks of a cluster share along k."""
    left = emit.tile_count(problem, config) % places(problem, config, device)
    return where(config.cluster_k > 1, left, 0)


def waves(problem: GemmProblem, config: GemmSm90Config, device: CudaDevice) -> Any:
    """Tiles that the busiest block computes one after another, whole or shared."""
    shared = shared_tiles(problem, config, device)
    return whole_tiles(problem, config, device) + (shared > 0)


def steps(problem: GemmProblem) -> int:
    """Stages of k that each tile reads."""
    return -(-problem.k // emit.tile_k(problem))


def shared_steps(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """Stages of k that the busiest block of a cluster reads for a shared tile."""
    return -(-steps(problem) // config.cluster_k)


def block_steps(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Any:
    """Stages of k that the busiest block reads."""
    whole = whole_tiles(problem, config, device) * steps(problem)
    shared = shared_tiles(problem, config, device) > 0
    return whole + shared * shared_steps(problem, config)


def columns_of(
    problem: GemmProblem, device: CudaDevice, **choices: Sequence[int]
) -> tuple[Columns, dict[str, int]]:
    """The configs of a grid worth measuring, and how many each rule refused."""
    return legal_columns(
        grid(**choices), GemmSm90Config, (*LEGAL, *WORTH), problem, device
    )


def of_columns(columns: Columns) -> GemmSm90Config:
    """A config whose fields, and therefore whose properties, are whole columns."""
    return as_config(GemmSm90Config, columns)


def derived(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Columns:
    """Features that say how a config fits the problem, for a surrogate model."""
    product = emit.computed(problem)
    m_tiles, n_tiles, batch = emit.tile_grid(problem, config)
    rows, cols = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    work = m_tiles * n_tiles * batch * steps(problem)
    clusters = emit.resident_clusters(config, device.sm_count) * config.cluster_k
    busiest = block_steps(problem, config, device)
    loaded = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    return {
        "log2_accumulators": np.log2(config.accumulators),
        "log2_smem_bytes": np.log2(emit.smem_bytes(problem, config)),
        "wave_efficiency": work / (busiest * clusters),
        "log2_padding": np.log2(
            m_tiles * rows / product.m * n_tiles * cols / product.n
        ),
        "log2_l2_bytes_per_mac": np.log2(loaded / (config.tile_m * config.tile_n)),
        "log2_k_steps": np.log2(busiest),
    }


# ---- what the kernel can do ----------------------------------------------------------


def _splits_unevenly(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.tile_m % (emit.SLAB * c.tile_consumers) != 0


def _holds_too_much(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.accumulators > accumulator_limit(p, c)


def _takes_no_turns(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.ping_pong & ((c.consumers != 2) | (c.cluster_k > 1))


def _is_a_large_cluster(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return (c.sharers > 2) | ((c.sharers > 1) & (c.cluster_k > 1))


def _splits_too_much(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """Clusters along k have no tile to share, more than one each, or too few steps.

    A cluster shares at most one tile, and each of its blocks must have a step in it.
    """
    shared = shared_tiles(p, c, d)
    clusters = emit.resident_clusters(c, d.sm_count)
    fits = (0 < shared) & (shared <= clusters) & (steps(p) >= c.cluster_k)
    return (c.cluster_k > 1) & ~fits


def _has_no_room_for_sums(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    ring = emit.smem_bytes(p, c, 0) - emit.SUBTILE_BYTES  # at least
    return (c.cluster_k > 1) & (4 * c.tile_m * c.tile_n > ring)


def _does_not_fit(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return emit.smem_bytes(p, c) > d.smem_per_block_bytes


def _deadlocks(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    return c.stages <= c.wait_depth


def _runs_out_of_registers(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """The residual's loads take more registers than there are.

    A residual that is not copied into shared memory is loaded into registers. Entries
    in odd rows are loaded one by one, each from its own address. So are the pairs of a
    transposed product, of which 16-bit rows hold twice as many.
    """
    transposed = emit.is_swapped(p) and ITEMSIZE[p.out] == 2
    scattered = transposed or not emit.maps_results(p)
    return (c.slabs > 1) & (p.epilogue.residual and scattered)


def _is_too_wide_for_its_turn(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """The accumulators leave too few registers for a residual, or for the producer.

    The producer needs the most registers for a shared left operand along m.
    """
    shared = (c.sharers > 1) & (emit.computed(p).layout[0] == "t")
    return (c.accumulators > emit.USUAL_ACCUMULATORS) & (p.epilogue.residual | shared)


def _does_not_wait(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    waits = emit.parts(p) > 1 or emit.takes_fragments(p)
    return waits & (c.wait_depth > 0)


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
            f"thread with {c.tile_consumers} consumers; at most "
            f"{accumulator_limit(p, c)} fit"
        ),
    ),
    Rule(
        code="turns",
        refuses=_takes_no_turns,
        why=lambda p, c, d: (
            "two consumers take turns, at tiles that no cluster shares: ping_pong "
            "needs consumers=2 and cluster_k=1"
        ),
    ),
    Rule(
        code="cluster",
        refuses=_is_a_large_cluster,
        why=lambda p, c, d: (
            "a cluster has at most 2 blocks: cluster_m * cluster_n <= 2, or both are 1 "
            "and blocks share k"
        ),
    ),
    Rule(
        code="split",
        refuses=_splits_too_much,
        why=lambda p, c, d: (
            f"cluster_k={c.cluster_k} needs as many steps of k and from 1 to "
            f"{emit.resident_clusters(c, d.sm_count)} tiles in the last round; there "
            f"are {steps(p)} steps and {shared_tiles(p, c, d)} tiles left of "
            f"{emit.tile_count(p, c)}"
        ),
    ),
    Rule(
        code="exchange",
        refuses=_has_no_room_for_sums,
        why=lambda p, c, d: (
            f"sums of a {c.tile_m}x{c.tile_n} tile do not fit into {c.stages} stages"
        ),
    ),
    Rule(
        code="smem",
        refuses=_does_not_fit,
        why=lambda p, c, d: (
            f"stages={c.stages} of {c.tile_m}x{c.tile_n} tiles exceed "
            f"{d.smem_per_block_bytes} bytes of shared memory; at most "
            f"{emit.most_stages(p, c, d.smem_per_block_bytes)} fit"
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
    Rule(
        code="registers",
        refuses=_runs_out_of_registers,
        why=lambda p, c, d: (
            f"a residual in rows of n={p.n} {p.out} takes the registers of more than "
            "64 rows a consumer"
        ),
    ),
    Rule(
        code="width",
        refuses=_is_too_wide_for_its_turn,
        why=lambda p, c, d: (
            f"{c.accumulators} accumulators a thread leave too few registers for "
            "a residual, or for copies of a left operand along m that blocks share"
        ),
    ),
    Rule(
        code="wait",
        refuses=_does_not_wait,
        why=lambda p, c, d: (
            "sums of parts, and fragments in registers, are waited for at each step: "
            "wait_depth=0"
        ),
    ),
)


# ---- what is worth measuring: one of several configs that run alike ------------------


def _computes_only_padding(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """A smaller tile, or one block of the cluster, would hold all of the output."""
    p = emit.computed(p)
    wide_m = (c.tile_m > emit.SLAB) & (p.m <= c.tile_m // 2)
    narrower = c.tile_n - where(c.tile_n > 128, 32, 64)  # the next choice
    wide_n = (c.tile_n > 64) & (p.n <= narrower)
    lone_m = (c.cluster_m > 1) & (p.m <= c.tile_m)
    lone_n = (c.cluster_n > 1) & (p.n <= c.tile_n)
    return wide_m | wide_n | lone_m | lone_n


def _shares_hardly_anything(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """The exchange of sums takes as long as the shorter last round saves."""
    unshared = waves(p, c, d) * steps(p)
    saved = unshared - block_steps(p, c, d)
    return (c.cluster_k > 1) & (saved < _WORTH_SHARING * unshared)


def _leaves_gaps_between_turns(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """Only one consumer multiplies at a time, and no other work fills its gaps.

    Partners along n each read all of their B: they are slower than partners along m, by
    up to a half.
    """
    return c.ping_pong & ((c.wait_depth == 0) | (c.cluster_n > 1))


def _has_no_turns(p: GemmProblem, c: GemmSm90Config, d: CudaDevice) -> Any:
    """One consumer would be as good, or one with tiles of twice the size."""
    return c.ping_pong & ((waves(p, c, d) < 2) | (c.accumulators < _FEW_ACCUMULATORS))


WORTH = (
    Rule(
        code="padding",
        refuses=_computes_only_padding,
        why=lambda p, c, d: (
            f"a {c.tile_m}x{c.tile_n} tile in clusters of {c.cluster_m}x{c.cluster_n} "
            f"is too large for what is computed, "
            f"{emit.computed(p).m}x{emit.computed(p).n}"
        ),
    ),
    Rule(
        code="gaps",
        refuses=_leaves_gaps_between_turns,
        why=lambda p, c, d: (
            "a consumer that multiplies alone must keep a batch in flight, and share "
            "the right operand if any: wait_depth=1, cluster_n=1"
        ),
    ),
    Rule(
        code="no_turns",
        refuses=_has_no_turns,
        why=lambda p, c, d: (
            f"each block has {waves(p, c, d)} tiles of {c.tile_m}x{c.tile_n} for its "
            f"consumers to take turns at; it is worth it for 2, with "
            f"{_FEW_ACCUMULATORS} accumulators a thread"
        ),
    ),
    idle_stages(2, block_steps),
    Rule(
        code="hardly_shared",
        refuses=_shares_hardly_anything,
        why=lambda p, c, d: (
            f"blocks that share the last of {waves(p, c, d)} rounds save less than the "
            "exchange of their sums takes"
        ),
    ),
    repeated_raster(
        USUAL_BAND,
        GRID["raster_band"],
        emit.tile_grid,
        at_once=lambda p, c, d: waves(p, c, d) == 1,
    ),
)
