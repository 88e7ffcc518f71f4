"""An analytic model of gemm_sm90's time, to rank configs before any are measured.

Caller: ``gemm_sm90``; XLA's time is modelled in ``gemm_xla_model``. Every formula takes
a config whose fields may be columns. A tile takes ``steps`` stages of 128 bytes along k
and an epilogue, in cycles of an SM:

    multiply = tile_m tile_n 64 / 2048                               tensor cores
    smem     = (tile_m / 64 (64 + tile_n) + tile_m + tile_n) / rate  rows of 128 bytes

    busy     = max(multiply, smem) + drain
    wait     = time to refill a stage, shared by the stages of the ring
    tile     = steps (busy^q + wait^q)^(1/q) + epilogue + overhead, less the part of
               epilogue and overhead that one consumer does while the other multiplies

Operands of several parts take more of multiply and smem. m, n and layout are those of
the product that is computed, see ``emit.computed``.

A problem takes as long as the busiest block, or longer if a limit of the device is
reached: power, L2, memory or the edge of the output. Close to several limits, each of
them adds to the time:

    time = (sm^p + power^p + l2^p + memory^p + edge^p)^(1/p) + exchange + launch
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants.gemm_sm90_space import (
    block_steps,
    places,
    shared_tiles,
    steps,
    waves,
)
from tracea_jax.variants.space import where

_MACS_PER_CYCLE = 2048  # dense, of 16-bit elements, of one SM
_PORT_BYTES_PER_CYCLE = 64  # into one SM
_FITS_IN_L2 = 0.5  # part of L2 that is left for data that is read again


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the formulas, fitted by ``benchmarks/fit_model.py``.

    They are fitted to times on an H200: of every legal config of 8 shapes
    (``space_gemm_sm90.json``), and of the shipped observations, 15 configs of each of
    20 problems. The constants of the exchange are estimates. The constant of turns was
    measured on three products with k of 128 and 256.

    Attributes:
      cycles_per_us: clock of an SM that power does not limit.
      macs_per_us: multiply-adds of the device, sustained under its power limit.
      smem_rows_per_cycle: rows of 128 bytes that one SM's shared memory moves.
      latency_cycles: until the first bytes of a stage arrive.
      pair_latency_cycles: additional latency if two blocks must have freed the stage.
      drain_cycles: lost in each step if no wgmma stays in flight and no other consumer
        fills the gap.
      tile_cycles: of each tile, whatever its size.
      epilogue_bytes_per_cycle: results and residuals that one consumer moves.
      turn_bytes_per_cycle: results and residuals that one consumer moves if consumers
        take turns, because the other consumer is seldom in its epilogue at that time.
      store_bytes_per_cycle: of results that must be stored before others are staged.
      activation_cycles: of one consumer, for 128 elements through an exponential.
      l2_bytes_per_us: bytes that the device reads from L2, in lines of 128 bytes.
      neighbours: consecutive blocks whose reads of the same lines L2 can serve as one.
      unshared: the part of such reads that L2 serves one by one.
      memory_bytes_per_us: of the device.
      edge_bytes_per_us: of zeros that replace rows of the left operand past its edge.
      launch_us: of each execution.
      pair_us: additional time if the blocks run in clusters of two.
      exchange_cycles: of each tile whose sums are exchanged in a cluster, and ...
      exchange_bytes_per_cycle: ... of the sums of a block.
      refill_overlap, overlap: the exponents q and p.
    """

    cycles_per_us: float = 1860.0
    macs_per_us: float = 3.75e8
    smem_rows_per_cycle: float = 1.31
    latency_cycles: float = 919.0
    pair_latency_cycles: float = 156.0
    drain_cycles: float = 88.4
    tile_cycles: float = 587.0
    epilogue_bytes_per_cycle: float = 5.68
    turn_bytes_per_cycle: float = 9.0
    store_bytes_per_cycle: float = 12.4
    activation_cycles: float = 10.7
    l2_bytes_per_us: float = 1.1e7
    neighbours: float = 9.0
    unshared: float = 0.398
    memory_bytes_per_us: float = 3.85e6
    edge_bytes_per_us: float = 1.72e6
    launch_us: float = 3.13
    pair_us: float = 0.969
    exchange_cycles: float = 2500.0
    exchange_bytes_per_cycle: float = 64.0
    refill_overlap: float = 10.2
    overlap: float = 4.81


CONSTANTS = Constants()


def modelled_us(
    problem: GemmProblem,
    config: GemmSm90Config,
    device: CudaDevice,
    constants: Constants = CONSTANTS,
) -> Any:
    """Time of one execution in microseconds; an array if the config holds columns."""
    a = constants
    step, tile = (
        _step_cycles(problem, config, a),
        _tile_cycles(problem, config, device, a),
    )
    tiles = waves(problem, config, device)
    busiest = block_steps(problem, config, device) * step + tiles * tile
    busiest -= (tiles - 1) * _hidden_cycles(problem, config, step, tile)
    blocks = emit.tile_count(problem, config) * config.sharers
    depth = steps(problem) * emit.TILE_K * emit.part_products(problem)
    macs = blocks * depth * config.tile_m * config.tile_n
    row_bytes = steps(problem) * emit.ROW_BYTES * emit.parts(problem)
    limits = (
        busiest / a.cycles_per_us,
        macs / a.macs_per_us,
        blocks * _block_rows(problem, config, a) * row_bytes / a.l2_bytes_per_us,
        _memory_bytes(problem, config, device) / a.memory_bytes_per_us,
        _edge_rows(problem, config) * row_bytes / a.edge_bytes_per_us,
    )
    bound = sum(limit**a.overlap for limit in limits) ** (1 / a.overlap)
    exchange = _exchange_cycles(problem, config, device, a) / a.cycles_per_us
    return bound + exchange + a.launch_us + a.pair_us * (config.cluster_size > 1)


# ---- one SM --------------------------------------------------------------------------


def _step_cycles(problem: GemmProblem, config: GemmSm90Config, a: Constants) -> Any:
    """Cycles of one step: tensor cores or shared memory, and waiting for a stage."""
    products = emit.part_products(problem)
    multiply = products * config.tile_m * config.tile_n * emit.TILE_K / _MACS_PER_CYCLE
    loaded = emit.loaded_rows(problem, config) + config.tile_n
    loaded = loaded * emit.parts(problem)
    read = (
        products
        * (config.tile_m // emit.SLAB)
        * (emit.lhs_wavefronts(problem) + config.tile_n)
    )
    busy = np.maximum(multiply, (read + loaded) / a.smem_rows_per_cycle)
    refill = a.latency_cycles + loaded * emit.ROW_BYTES / _PORT_BYTES_PER_CYCLE
    refill += a.pair_latency_cycles * (config.sharers - 1)
    # With a batch in flight, a stage is held until the next one has been issued.
    wait = where(
        config.wait_depth == 0,
        (busy + refill) / config.stages,
        refill / np.maximum(config.stages - 1, 1),
    )
    exposed = (config.wait_depth == 0) & (config.tile_consumers == 1)
    q = a.refill_overlap
    return ((busy + a.drain_cycles * exposed) ** q + wait**q) ** (1 / q)


def _tile_cycles(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice, a: Constants
) -> Any:
    """Cycles of a tile besides its steps; each consumer finishes its own rows."""
    elements = config.tile_m * config.tile_n / config.tile_consumers
    stored = elements * ITEMSIZE[problem.out] * _results(problem)
    together = a.epilogue_bytes_per_cycle
    has_exponential = problem.epilogue.activation not in ("none", "relu")
    return (
        a.tile_cycles
        + stored / where(config.ping_pong, a.turn_bytes_per_cycle, together)
        + late_bytes(problem, config, device) / a.store_bytes_per_cycle
        + has_exponential * elements / 128 * a.activation_cycles
    )


def _hidden_cycles(
    problem: GemmProblem, config: GemmSm90Config, step: Any, tile: Any
) -> Any:
    """The part of ``_tile_cycles`` that is hidden behind the other consumer's products.

    Two consumers that share a tile can drift apart by as many steps as the ring has
    stages. Of two consumers that take turns, one finishes its tile while the other
    multiplies the next tile. If finishing takes longer than a tile's products, both
    finish tiles at the same time.
    """
    multiply = steps(problem) * step
    drift = np.minimum(config.stages, steps(problem)) * step / 2
    shared = (config.consumers == 2) * np.minimum(drift, tile)
    in_turn = np.minimum(tile, (multiply + tile) / 2)
    return where(config.ping_pong, in_turn, shared)


def _exchange_cycles(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice, a: Constants
) -> Any:
    """Cycles that a cluster takes to sum the tile that its blocks share.

    That tile is the last one of the blocks, so no reads are left that could hide them.
    """
    exchanged = 4 * config.tile_m * config.tile_n
    shares = shared_tiles(problem, config, device) > 0
    return shares * (a.exchange_cycles + exchanged / a.exchange_bytes_per_cycle)


def late_bytes(problem: GemmProblem, config: GemmSm90Config, device: CudaDevice) -> Any:
    """Bytes of one consumer's results that must wait for a free staging buffer.

    The ring leaves room for as many buffers as ``emit.storage`` counts.
    """
    room = device.smem_per_block_bytes - emit.smem_bytes(problem, config, 0)
    buffers = np.maximum(room // (config.consumers * emit.SUBTILE_BYTES), 2)
    stores = emit.stores(problem, config)
    return np.maximum(stores - buffers, 0) * emit.SUBTILE_BYTES


def _results(problem: GemmProblem) -> int:
    """Matrices of the output's size that the epilogue reads or writes."""
    return 1 + problem.epilogue.save_preactivation + problem.epilogue.residual


# ---- the device ----------------------------------------------------------------------


def _block_rows(problem: GemmProblem, config: GemmSm90Config, a: Constants) -> Any:
    """Lines of 128 bytes that a block makes L2 read in one step.

    A block of a cluster shares one operand with its partner. A block without a cluster
    shares whole lines with neighbours in the raster that read the same lines at the
    same time: those of A with blocks of other columns, those of B with blocks of other
    rows of its band. Neighbouring clusters do not share: in measurements they took
    longer than sharing would explain.
    """
    problem = emit.computed(problem)
    m_tiles, n_tiles, _ = emit.tile_grid(problem, config)
    high = np.minimum(np.minimum(config.raster_band, m_tiles), a.neighbours)
    wide = np.minimum(n_tiles, a.neighbours / high)
    left, right = problem.layout
    lhs_lines = _lines_of_row(problem.m if left == "t" else problem.k)
    rhs_lines = _lines_of_row(problem.k if right == "t" else problem.n)
    alone = config.cluster_size == 1
    lhs = lhs_lines * _once(wide, alone & (lhs_lines == 1), a)
    rhs = rhs_lines * _once(high, alone & (rhs_lines == 1), a)
    rows = emit.loaded_rows(problem, config)
    # L2 is asked for all lines of a slab, also of one that the edge cuts short.
    columns = emit.stored_columns(problem, config)
    return lhs * rows / config.cluster_n + rhs * columns / config.cluster_m


def _once(readers: Any, shares: Any, a: Constants) -> Any:
    """The part of a block's reads that L2 serves if ``readers`` blocks share them."""
    return where(shares, a.unshared + (1 - a.unshared) / readers, 1.0)


def _lines_of_row(extent: int) -> float:
    """Number of lines of 128 bytes over which 128 bytes of a row spread, on average.

    Rows of an odd number of 16-byte units can start anywhere in a line.
    """
    return 2 - math.gcd(2 * extent, emit.ROW_BYTES) / emit.ROW_BYTES


def _edge_rows(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """Rows of A past its edge that the blocks ask for in one step.

    If A has 16 rows, copies of 64 rows take longer than if it has 64. The difference
    grows with the number of blocks that copy.
    """
    m_tiles, n_tiles, batch = emit.tile_grid(problem, config)
    rows = m_tiles * config.cluster_m * emit.loaded_rows(problem, config)
    past = np.maximum(rows - emit.computed(problem).m, 0)
    return past * n_tiles * config.cluster_n * batch


def _memory_bytes(
    problem: GemmProblem, config: GemmSm90Config, device: CudaDevice
) -> Any:
    """Bytes moved between memory and L2, with those that the raster reads again.

    A wave reads the rows of its bands and some columns. The next wave reads again the
    part of the rows that does not fit in L2 together with the columns. The next bands
    read again the part of B that does not fit in L2.
    """
    problem = emit.computed(problem)
    m_tiles, n_tiles, batch = emit.tile_grid(problem, config)
    at_once = places(problem, config, device)
    band = np.minimum(config.raster_band, m_tiles)
    width = np.minimum(-(-at_once // band), n_tiles)
    height = np.minimum(np.maximum(band, at_once / width), m_tiles)  # of several bands
    rows = np.minimum(height * config.tile_m * config.cluster_m, problem.m)
    cols = np.minimum(width * config.tile_n * config.cluster_n, problem.n)
    depth = problem.k * ITEMSIZE[problem.lhs]  # bytes of a row or column
    room = _FITS_IN_L2 * device.l2_bytes / depth
    waves_again = -(-n_tiles // width) - 1
    bands_again = m_tiles / height - 1
    lhs = problem.m * (1 + waves_again * _misses(rows + cols, room))
    rhs = problem.n * (1 + bands_again * _misses(problem.n, room))
    out = problem.m * problem.n * ITEMSIZE[problem.out] * _results(problem)
    return batch * ((lhs + rhs) * depth + out)


def _misses(wanted: Any, room: float) -> Any:
    """The fraction of the ``wanted`` rows or columns that exceeds ``room``."""
    return 1 - np.minimum(room / wanted, 1.0)
