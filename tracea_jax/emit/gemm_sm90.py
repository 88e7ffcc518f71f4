"""gemm_sm90 in numbers: its config, and all that follows from a problem and a config.

A config holds the free choices. Shared memory, threads, grid, the order of tiles and
the boxes of copies are derived here by pure functions; ``gemm_sm90_kernel`` carries
them to the device code, which asserts that it arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, GemmProblem

ROW_UNIT_BYTES = 16  # rows that tensor maps can have are multiples
ROW_BYTES = 128  # of a tile along k, or of m or n: the widest swizzled box
TILE_K = 64  # of 16-bit elements: one row
SLAB = 64  # rows of one wgmma; also elements of one row of an m- or n-major tile
WARP, WARPGROUP = 32, 128
MAX_STAGES = 12
USUAL_ACCUMULATORS = 128  # of a thread, at most: with more it needs more registers
_GPCS = 8  # at most
SUBTILE_BYTES = SLAB * ROW_BYTES  # of the output, in shared memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSm90Config:
    """The free choices of gemm_sm90, named from the product that ``computed`` says.

    Attributes:
      tile_m, tile_n: rows and columns of the output that one block computes at a time.
      stages: depth of the ring of operand tiles, each 128 bytes deep in k.
      consumers: warpgroups that multiply; they split the rows of the tile.
      cluster_m, cluster_n: blocks that share operand copies, along m or n.
      cluster_k: blocks that share the tiles of the last round, each a range of k.
      raster_band: rows of clusters of one band of the tile order.
      wait_depth: batches of wgmma that stay in flight while the next one is issued.
      ping_pong: consumers take tiles in turn, one finishes its own while the other
        multiplies.
    """

    tile_m: int
    tile_n: int
    stages: int
    consumers: int = 2
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    raster_band: int = 8
    wait_depth: int = 1
    ping_pong: bool = False

    @property
    def tile_consumers(self) -> int:
        """Warpgroups that share a tile."""
        return 1 + (self.consumers - 1) * (1 - self.ping_pong)

    @property
    def sharers(self) -> int:
        """Blocks that copy each operand tile of a cluster together."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_size(self) -> int:
        return self.sharers * self.cluster_k

    @property
    def slabs(self) -> int:
        """64-row slabs of each consumer."""
        return self.tile_m // (SLAB * self.tile_consumers)

    @property
    def summed_slabs(self) -> int:
        """Those whose columns a warp sums together: two, if it has them.

        Blocks that share a tile own some of its slabs, and more accumulators, or slabs
        to sum, leave too few registers.
        """
        in_pairs = self.cluster_k == 1 and self.accumulators <= 128
        return min(self.slabs, 2) if in_pairs else 1

    @property
    def accumulators(self) -> int:
        """f32 registers of each consumer thread."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.tile_consumers)

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n} s{self.stages} w{self.consumers} "
            f"c{self.cluster_m}x{self.cluster_n}x{self.cluster_k} "
            f"r{self.raster_band} d{self.wait_depth}{' pp' * self.ping_pong}"
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


def storage(
    problem: GemmProblem,
    config: GemmSm90Config,
    limit_bytes: int,
    *,
    gated: bool = False,
) -> Storage:
    """The layout with as many staging buffers as fit, from 2 to one for every store.

    The result of two buffers may exceed the limit; then the config is not legal.
    """
    per_tile = stores(problem, config, gated=gated)
    counts = range(max(per_tile, 2), 2, -1)
    fitting = (b for b in counts if smem_bytes(problem, config, b) <= limit_bytes)
    buffers = next(fitting, 2)
    return Storage(
        epilogue_buffers=buffers, smem_bytes=int(smem_bytes(problem, config, buffers))
    )


def stores(problem: GemmProblem, config: GemmSm90Config, *, gated: bool = False) -> Any:
    """Sub-tiles that one consumer stores of each tile."""
    columns = ROW_BYTES // ITEMSIZE[problem.out]
    tiles = config.slabs * -(-config.tile_n // columns)
    saved = problem.epilogue.save_preactivation
    if gated:  # half of the columns are y's; g and u are saved together
        return tiles // 2 * (1 + 2 * saved)
    return tiles * (1 + saved)


def smem_bytes(
    problem: GemmProblem, config: GemmSm90Config, epilogue_buffers: int = 2
) -> Any:
    """Shared memory of one block; without a count, the least that the kernel needs."""
    bias_columns = config.consumers * (
        SLAB * config.slabs if is_swapped(problem) else config.tile_n
    )
    rows = loaded_rows(problem, config) + stored_columns(problem, config)
    ring = config.stages * parts(problem) * rows * ROW_BYTES
    staging = config.consumers * epilogue_buffers * SUBTILE_BYTES
    bias = 4 * bias_columns
    copies = np.where(maps_residual(problem, config), stores(problem, config), 0)
    barriers = 8 * (2 * config.stages + config.consumers * (1 + copies))
    period = SWIZZLE_128B.period_bytes
    return -(-(ring + staging + bias + barriers) // period) * period


def most_stages(problem: GemmProblem, config: GemmSm90Config, limit_bytes: int) -> int:
    """The deepest ring that fits beside two staging buffers; 0 if none does."""
    rings = (dataclasses.replace(config, stages=s) for s in range(1, MAX_STAGES + 1))
    fitting = (r.stages for r in rings if smem_bytes(problem, r) <= limit_bytes)
    return max(fitting, default=0)


def is_swapped(problem: GemmProblem) -> bool:
    """Returns whether the transposed product is computed, and stored transposed.

    The tensor cores read float32 operands from shared memory only along k. Of a plain
    x @ w only x is stored so, and only the left one may come from registers instead.
    """
    return problem.lhs == "float32" and problem.layout == "nn"


def takes_fragments(problem: GemmProblem) -> bool:
    """Returns whether the left operand, stored along m, passes through registers."""
    return problem.lhs == "float32" and computed(problem).layout == "tt"


def computed(problem: GemmProblem) -> GemmProblem:
    """The product that the kernel computes: C, or its transpose rhs^T lhs^T.

    Tiles, clusters and the raster are those of this one, and so are all fields of a
    config: tile_m counts columns of a swapped problem, and tile_n its rows. Results and
    the epilogue stay those of the problem.
    """
    if not is_swapped(problem):
        return problem
    return dataclasses.replace(
        problem,
        m=problem.n,
        n=problem.m,
        lhs=problem.rhs,
        rhs=problem.lhs,
        layout="tt",
        lhs_batched=problem.rhs_batched,
        rhs_batched=problem.lhs_batched,
    )


def parts(problem: GemmProblem) -> int:
    """Arrays that each operand consists of, one after another."""
    return 3 if problem.lhs == "bfloat16x3" else 1


def part_products(problem: GemmProblem) -> int:
    """Products of parts of one stage."""
    return {1: 1, 3: 6}[parts(problem)]


def element_bytes(problem: GemmProblem) -> int:
    """Bytes of an element that the tensor cores multiply."""
    return ITEMSIZE[problem.lhs] // parts(problem)


def tile_k(problem: GemmProblem) -> int:
    """Elements of k in one stage."""
    return ROW_BYTES // element_bytes(problem)


def loaded_rows(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """Rows of the left operand's tile that are copied.

    The tensor cores multiply 64 rows at least. If C has fewer and A is stored along k,
    the next power of two is enough: the others never reach the rows that are stored.
    """
    problem = computed(problem)
    if problem.m > SLAB // 2 or problem.layout[0] == "t":
        return config.tile_m
    few = max(8, 1 << (problem.m - 1).bit_length())
    alone = (config.tile_m == SLAB) & (config.cluster_n == 1)
    return np.where(alone, few, config.tile_m)


def stored_columns(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """Columns that a stage has room for: along n, they lie in slabs of 64."""
    if computed(problem).layout[1] == "t":
        return config.tile_n
    return -(-config.tile_n // SLAB) * SLAB


def tail_columns(problem: GemmProblem, config: GemmSm90Config) -> int:
    """Columns in the last slab of the right operand's tile if it ends early, else 0.

    They have a tensor map of their own: copies of whole slabs would move the rest too.
    """
    along_n = computed(problem).layout[1] == "n"
    return config.tile_n % SLAB if along_n else 0


def lhs_wavefronts(problem: GemmProblem) -> int:
    """Wavefronts (128 bytes) for reading 64 rows of the left operand of a stage.

    Fragments whose rows are columns of the tile as they come conflict in pairs; the
    transposed product is free to pair columns instead (``ir.register_operand``).
    """
    conflicts = takes_fragments(problem) and not is_swapped(problem)
    return SLAB * (2 if conflicts else 1)


def registers(config: GemmSm90Config) -> tuple[int, int]:
    """setmaxnreg of producer and consumers; zeros leave the launch's budget alone.

    One consumer starts with all it can have; two take what the producer gives back.
    """
    if config.consumers == 1:
        return 0, 0
    return (24, 240) if config.accumulators > USUAL_ACCUMULATORS else (40, 232)


def tile_grid(problem: GemmProblem, config: GemmSm90Config) -> tuple[int, int, int]:
    """Clusters' tiles along m, n and batch; the last ones may hang over the edge."""
    problem = computed(problem)
    return (
        -(-problem.m // (config.tile_m * config.cluster_m)),
        -(-problem.n // (config.tile_n * config.cluster_n)),
        problem.batch,
    )


def tile_count(problem: GemmProblem, config: GemmSm90Config) -> int:
    """Tiles of clusters in all batches."""
    m_tiles, n_tiles, batch = tile_grid(problem, config)
    return m_tiles * n_tiles * batch


def resident_clusters(config: GemmSm90Config, sm_count: int) -> Any:
    """Clusters that run at the same time whatever the chip.

    A cluster lies in one GPC, whose SMs come in pairs, and chips differ in which pairs
    are missing: clusters of four may leave a pair of each GPC idle (30 of them ran at
    once on an H200 with 132 SMs).
    """
    size = config.cluster_size
    usable = np.where(size > 2, sm_count - 2 * _GPCS, sm_count)
    return np.maximum(usable // size, 1)


def grid(problem: GemmProblem, config: GemmSm90Config, sm_count: int) -> int:
    """Blocks of the persistent launch: whole clusters, no more than fit."""
    clusters = int(resident_clusters(config, sm_count))
    return config.cluster_size * max(1, min(tile_count(problem, config), clusters))


def box_rows_a(problem: GemmProblem, config: GemmSm90Config) -> int:
    """Rows in one copy of the left operand's tile; the problem is as ``computed``."""
    rows = int(loaded_rows(problem, config))
    return _box_rows(rows, problem.layout[0] == "t", config.cluster_n, tile_k(problem))


def box_rows_b(problem: GemmProblem, columns: int, config: GemmSm90Config) -> int:
    """The same of the right operand, of whose tile so many columns are copied."""
    along_n = problem.layout[1] == "n"
    return _box_rows(columns, along_n, config.cluster_m, tile_k(problem))


def _box_rows(extent: int, mn_major: bool, sharers: int, tile_k: int) -> int:
    """Rows of 128 bytes in one copy of an operand tile that some blocks share.

    Of an m- or n-major tile, rows are as many elements as a stage has of k.
    """
    if not mn_major:
        return extent // sharers
    return tile_k if -(-extent // tile_k) % sharers == 0 else tile_k // sharers


def sum_rows(problem: GemmProblem, config: GemmSm90Config) -> int:
    """Rows of partial column sums that the kernel leaves.

    One for each warp of a consumer, of its rows of ``summed_slabs``.
    """
    groups = -(-problem.m // (SLAB * config.summed_slabs))
    return problem.batch * groups * (WARPGROUP // WARP)


def maps_results(problem: GemmProblem) -> bool:
    """True if rows of the results are multiples of 16 bytes, as tensor maps have."""
    return problem.n * ITEMSIZE[problem.out] % ROW_UNIT_BYTES == 0


def maps_residual(problem: GemmProblem, config: GemmSm90Config) -> Any:
    """True if the residual is copied into the staging buffers that results leave from.

    See kernels/cuda/tile/epilogue_residual.cuh for why not.
    """
    epilogue = problem.epilogue
    itemsize = ITEMSIZE[epilogue.residual_dtype or problem.out]
    has_boxes = maps_results(problem) and itemsize == ITEMSIZE[problem.out]
    in_turn = not (is_swapped(problem) or epilogue.save_preactivation)
    return (epilogue.residual and has_boxes and in_turn) & (config.cluster_k == 1)
