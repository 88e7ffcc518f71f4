"""The config of attention_backward_sm90, and what follows from it in numbers.

What a tile or a ring takes of shared memory and of registers, and what the kernels
read, follow from config and problem; the device code asserts that it arrives at the
same bytes. Callers: ``attention_backward_kernels``, and the variant of that name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sides as sides
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit.attention_gradient_scores import GradientScores
from tracea_jax.problem import AttentionProblem

_ROW_BYTES = 128  # of a slab
_ALIGNMENT = 1024  # of tiles, which the whole is a multiple of
_BARRIERS = 256  # bytes for them, and for words that both roles read
ROWS_TILE = 64  # queries of a block of the first kernel
MOST_BLOCKS = 1 << 14  # of queries or keys, for which a map of segments has bits
_CROWD_REGISTERS = 8  # of a thread: see is_crowded
_CAP_REGISTERS = 24  # that tanh and its derivative take more of a thread
SINGLE_REGISTERS = 192  # for sums and scores, of a consumer that is the only one
HALF = 128  # columns that a consumer has of wide heads
WIDEST = 192  # head whose columns one consumer has registers for
PART = 64  # rows and columns of what one consumer adds to the sums of dq
_MAP_BYTES = 2 * MOST_BLOCKS // 8  # of those that are seen, and of full ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackwardSm90Config:
    """The free choices of attention_backward_sm90.

    Attributes:
      tile_kv: keys of a tile, 64 for each consumer of the kernel for dk and dv; 64 in
        all where consumers split wide heads.
      block_q: queries that it takes at a time.
      stages_q: blocks of queries that its shared memory holds.
      tile_q: queries of a tile, 64 for each consumer of the kernel for dq.
      block_kv: keys that it takes at a time.
      stages_kv: blocks of keys, and of values, that its shared memory holds.
      dq: how dq is computed. "recomputed": by a kernel of its own, which computes all
        scores again, or "beside": by blocks of one launch with those for dk and dv;
        else by the kernel for dk and dv, which adds it up in memory: "atomic", in no
        order, so that its last bits differ from run to run, or "ordered", the tiles of
        keys one after the other.
    """

    tile_kv: int
    block_q: int
    stages_q: int = 2
    tile_q: int
    block_kv: int
    stages_kv: int = 2
    dq: Literal["recomputed", "beside", "ordered", "atomic"] = "recomputed"

    @property
    def adds(self) -> Any:
        """Returns whether dq is added up in memory."""
        return (self.dq != "recomputed") & (self.dq != "beside")

    def __str__(self) -> str:
        keys = f"{self.tile_kv}x{self.block_q} s{self.stages_q}"
        if self.adds:
            return f"{keys} {self.dq}"
        queries = f"{self.tile_q}x{self.block_kv} s{self.stages_kv}"
        return f"{keys} {queries}" + " beside" * (self.dq == "beside")


def _pair_bytes(problem: AttentionProblem, rows: Any) -> Any:
    """Bytes of so many rows of keys and values, or of queries and do."""
    slabs = forward.slabs(problem.head_dim) + forward.slabs(problem.columns)
    return slabs * rows * _ROW_BYTES


def keys_smem_bytes(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Shared memory of a block of the kernel for dk and dv."""
    rows = -(-planes(problem) * config.block_q * 4 // _ROW_BYTES) * _ROW_BYTES
    block = _pair_bytes(problem, config.block_q) + rows
    tile = _pair_bytes(problem, config.tile_kv)
    # Gradients of scores, two buffers, and a part of dq for each of two consumers.
    scores = 2 * -(-config.block_q // PART) * config.tile_kv * _ROW_BYTES
    sums = (scores + 2 * 4 * PART * PART + _BARRIERS + _ALIGNMENT) * config.adds
    bias = config.tile_kv // PART * _bias_bytes(problem, config.block_q)
    return _whole(problem, tile + config.stages_q * (block + bias) + sums)


def queries_smem_bytes(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Shared memory of a block of the kernel for dq."""
    block = _pair_bytes(problem, config.block_kv) + config.block_kv * 4 + 128
    tile = _pair_bytes(problem, config.tile_q)
    bias = -(-config.block_kv // PART) * _bias_bytes(problem, config.tile_q)
    return _whole(problem, tile + config.stages_kv * (block + bias))


def _bias_bytes(problem: AttentionProblem, queries: Any) -> Any:
    """Bytes of a bias tile of so many queries and 64 keys; 0 if none is copied."""
    return queries * _ROW_BYTES * rules.biased_by_tiles(problem)


def _whole(problem: AttentionProblem, tiles: Any) -> Any:
    """Shared memory, tiles and all."""
    total = tiles + _BARRIERS + _MAP_BYTES * (problem.segments and not problem.mask)
    return -(-total // _ALIGNMENT) * _ALIGNMENT


def keys_registers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Registers of a thread: two sums, two blocks of scores, and rounded weights."""
    weights = config.block_q // 4 * (1 - _saves_registers(problem, config))
    return _without_weights(problem, config) + weights


def is_tight(problem: AttentionProblem, config: AttentionBackwardSm90Config) -> Any:
    """Returns whether rounded weights have no registers beside both weights and v do'.

    They are then rounded only when v do' is known, and meet do later.
    """
    sums = config.adds & (config.block_q == 2 * PART)
    return sums | (_saves_registers(problem, config) == 1)


def _saves_registers(problem: AttentionProblem, config: Any) -> Any:
    """1 where a single consumer, which has fewest, could not have all; else 0."""
    whole = _without_weights(problem, config) + config.block_q // 4
    return (consumers_of_keys(problem, config) == 1) * (whole > SINGLE_REGISTERS)


def _without_weights(problem: AttentionProblem, config: Any) -> Any:
    columns = 2 * HALF if splits(problem) else problem.head_dim + problem.columns
    is_single = consumers_of_keys(problem, config) == 1
    crowd = is_crowded(problem) | (is_single & (_kinds(problem) > 0))
    return columns // 2 + config.block_q + _CROWD_REGISTERS * crowd


def queries_registers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Registers of a thread: sums, two blocks of scores, rounded score gradients."""
    of_cap = _CAP_REGISTERS * (problem.soft_cap is not None)
    more = of_cap + _CROWD_REGISTERS * is_crowded(problem)
    return problem.head_dim // 2 + config.block_kv + config.block_kv // 4 + more


def splits(problem: AttentionProblem) -> bool:
    """Returns whether two consumers share keys, and each has half of the columns."""
    return problem.head_dim > WIDEST and problem.columns > WIDEST


def consumers_of_keys(problem: AttentionProblem, config: Any) -> Any:
    """Warpgroups that multiply in the kernel for dk and dv."""
    return 2 if splits(problem) else config.tile_kv // forward.ROWS


def is_crowded(problem: AttentionProblem) -> bool:
    """True if more is done to scores than there are registers for beside all else."""
    return _kinds(problem) > 2


def _kinds(problem: AttentionProblem) -> int:
    """Number of score modifiers: soft cap, bias, ALiBi, boolean mask."""
    p = problem
    kinds = (p.soft_cap, p.bias, p.alibi, p.mask)
    return sum(kind is not None for kind in kinds)


def padded(problem: AttentionProblem, config: AttentionBackwardSm90Config) -> int:
    """Queries of a head for which there are exponents and deltas: whole blocks."""
    return -(-problem.q_len // config.block_q) * config.block_q


def planes(problem: AttentionProblem) -> int:
    """Numbers of a query: exponent, delta, the id of its segment, and a cap."""
    return 2 + problem.segments + (problem.bias is not None)


def rows_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Shape of the per-query numbers (see ``planes``)."""
    shape = (planes(problem), padded(problem, config))
    return (problem.batch, problem.heads, *shape)


def sums_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Shape of the sums of dq, in the parts that tile/attention_sums.cuh describes."""
    parts = padded(problem, config) // PART * forward.slabs(problem.head_dim)
    return (problem.batch, problem.heads, parts, PART * PART)


def turns_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Shape of the counters of key tiles that have added to dq of each block."""
    blocks = padded(problem, config) // config.block_q
    return (problem.batch, problem.heads, blocks)


def blind_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Shape of the sums of do over the queries of a tile that see no key."""
    tiles = -(-padded(problem, config) // ROWS_TILE)
    return (problem.batch, tiles, problem.heads, problem.columns)


def padded_kv(problem: AttentionProblem, config: AttentionBackwardSm90Config) -> int:
    """Keys of an example of which ids are stored: whole blocks."""
    return -(-problem.kv_len // config.block_kv) * config.block_kv


def beside_keys(problem: AttentionProblem, config: Any) -> GradientScores:
    """Biases and masks of the kernel for dk and dv."""
    side = sides.of_keys(problem, config.tile_kv, config.block_q)
    has_mask = problem.mask is not None
    return GradientScores(problem=problem, side=side, is_mapped=has_mask)


def beside_queries(problem: AttentionProblem, config: Any) -> GradientScores:
    """Biases and masks of the kernel for dq."""
    side = sides.of_queries(problem, config.tile_q, config.block_kv)
    has_mask = problem.mask is not None
    return GradientScores(problem=problem, side=side, is_mapped=has_mask)


# Buffers of the least and the largest id of tiles and blocks: (ids, config's field).
SPANS_READ = ("q_segments", "kv_segments")
SPANS = {
    "spans_tile_kv": ("kv_segments", "tile_kv"),
    "spans_block_q": ("q_segments", "block_q"),
    "spans_tile_q": ("q_segments", "tile_q"),
    "spans_block_kv": ("kv_segments", "block_kv"),
}


def _lengths(problem: AttentionProblem) -> list[str]:
    return ["q_lengths"] * problem.q_lengths + ["kv_lengths"] * problem.kv_lengths


def rows_reads(problem: AttentionProblem) -> tuple[str, ...]:
    """Operands of the first kernel."""
    p = problem
    there = {
        "q_lengths": p.q_lengths,
        "q_segments": p.segments,
        "bias": p.bias is not None,
        "mask": p.bias is not None and p.mask is not None,
        "kv_lengths": p.bias is not None and p.kv_lengths,
        "kv_segments": p.bias is not None and p.segments,
    }
    return ("o", "do", "lse", *(name for name, is_read in there.items() if is_read))


def begun(config: AttentionBackwardSm90Config) -> tuple[str, ...]:
    """Buffers that the first kernel zeroes and the one for dk and dv adds to."""
    return {"ordered": ("turns",), "atomic": ("sums",)}.get(config.dq, ())


def keys_reads(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, has_blind: bool
) -> tuple[str, ...]:
    """Operands of the kernel for dk and dv."""
    spans = ["spans_tile_kv", "spans_block_q"] if problem.segments else []
    rest = [*spans, *["everywhere"] * has_blind, *begun(config)]
    return (*common_reads(problem), *rest, *beside_keys(problem, config).reads)


def keys_writes(config: AttentionBackwardSm90Config) -> tuple[str, ...]:
    """Results of the kernel for dk and dv."""
    sums = {"ordered": ("sums", "turns"), "atomic": ("sums",)}
    return ("dk", "dv", *sums.get(config.dq, ()))


def queries_reads(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[str, ...]:
    """Operands of the kernel for dq."""
    spans = ["spans_tile_q", "spans_block_kv"] if problem.segments else []
    return (*common_reads(problem), *spans, *beside_queries(problem, config).reads)


def both_reads(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, has_blind: bool
) -> tuple[str, ...]:
    """Operands of the kernel for dk, dv and dq."""
    reads = keys_reads(problem, config, has_blind), queries_reads(problem, config)
    return tuple(dict.fromkeys((*reads[0], *reads[1])))


def common_reads(problem: AttentionProblem) -> tuple[str, ...]:
    """Operands of all kernels that compute scores."""
    ids = ["ids_kv"] * problem.segments
    return ("q", "k", "v", "do", "rows", *_lengths(problem), *ids)


def dq_reads(config: AttentionBackwardSm90Config) -> tuple[str, ...]:
    """Operands of the kernel that rounds the sums of dq."""
    return ("sums", *("turns",) * (config.dq == "ordered"))


def number(operands: tuple[str, ...], name: str) -> int:
    """Index of an operand; -1, a null pointer, if it is absent."""
    return operands.index(name) if name in operands else -1
