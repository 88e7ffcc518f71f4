"""The config of attention_backward_sm90, and what follows from it in numbers.

What a tile or a ring takes of shared memory and of registers, and what the kernels
read, follow from config and problem; the device code asserts that it arrives at the
same bytes. Callers: ``attention_backward_kernels``, and the variant of that name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.problem import AttentionProblem

_ROW_BYTES = 128  # of a slab
_ALIGNMENT = 1024  # of tiles, which the whole is a multiple of
_BARRIERS = 256  # bytes for them, and for words that both roles read
ROWS_TILE = 64  # queries of a block of the first kernel
MOST_BLOCKS = 1 << 14  # of queries or keys, for which a map of segments has bits
_MAP_BYTES = 2 * MOST_BLOCKS // 8  # of those that are seen, and of full ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackwardSm90Config:
    """The free choices of attention_backward_sm90.

    Attributes:
      tile_kv: keys of a tile, 64 for each consumer of the kernel for dk and dv.
      block_q: queries that it takes at a time.
      stages_q: blocks of queries that its shared memory holds.
      tile_q: queries of a tile, 64 for each consumer of the kernel for dq.
      block_kv: keys that it takes at a time.
      stages_kv: blocks of keys, and of values, that its shared memory holds.
    """

    tile_kv: int
    block_q: int
    stages_q: int = 2
    tile_q: int
    block_kv: int
    stages_kv: int = 2

    def __str__(self) -> str:
        keys = f"{self.tile_kv}x{self.block_q} s{self.stages_q}"
        return f"{keys} {self.tile_q}x{self.block_kv} s{self.stages_kv}"


def _tile_bytes(problem: AttentionProblem, rows: Any) -> Any:
    return forward.slabs(problem.head_dim) * rows * _ROW_BYTES


def keys_smem_bytes(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Shared memory of a block of the kernel for dk and dv."""
    rows = -(-(2 + problem.segments) * config.block_q * 4 // 128) * 128 + 128
    block = 2 * _tile_bytes(problem, config.block_q) + rows
    tile = 2 * _tile_bytes(problem, config.tile_kv)
    return _whole(problem, tile + config.stages_q * block)


def queries_smem_bytes(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Shared memory of a block of the kernel for dq."""
    block = 2 * _tile_bytes(problem, config.block_kv) + config.block_kv * 4 + 128
    tile = 2 * _tile_bytes(problem, config.tile_q)
    return _whole(problem, tile + config.stages_kv * block)


def _whole(problem: AttentionProblem, tiles: Any) -> Any:
    """Shared memory, tiles and all."""
    total = tiles + _BARRIERS + _MAP_BYTES * problem.segments
    return -(-total // _ALIGNMENT) * _ALIGNMENT


def keys_registers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Of a thread: two sums, two blocks of scores, and weights."""
    return problem.head_dim + config.block_q + config.block_q // 4


def queries_registers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Any:
    """Of a thread: sums, two blocks of scores, and rounded gradients of scores."""
    return problem.head_dim // 2 + config.block_kv + config.block_kv // 4


def padded(problem: AttentionProblem, config: AttentionBackwardSm90Config) -> int:
    """Queries of a head for which there are exponents and deltas: whole blocks."""
    return -(-problem.q_len // config.block_q) * config.block_q


def rows_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Of the exponents and deltas."""
    planes = 2 + problem.segments
    return (problem.batch, problem.heads, planes, padded(problem, config))


def blind_shape(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> tuple[int, ...]:
    """Of the sums of do over the queries of a tile that see no key."""
    tiles = -(-padded(problem, config) // ROWS_TILE)
    return (problem.batch, tiles, problem.heads, problem.head_dim)


def padded_kv(problem: AttentionProblem, config: AttentionBackwardSm90Config) -> int:
    """Keys of an example of which ids are stored: whole blocks."""
    return -(-problem.kv_len // config.block_kv) * config.block_kv


# Buffers of the least and the largest id of tiles and blocks: (ids, config's field).
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
    ids = ["q_segments"] * problem.segments
    return ("o", "do", "lse", *["q_lengths"] * problem.q_lengths, *ids)


def keys_reads(problem: AttentionProblem, has_blind: bool) -> tuple[str, ...]:
    """Operands of the kernel for dk and dv."""
    spans = ["spans_tile_kv", "spans_block_q"] if problem.segments else []
    rest = [*spans, *["everywhere"] * has_blind]
    return (*_reads(problem), *rest)


def queries_reads(problem: AttentionProblem) -> tuple[str, ...]:
    """Operands of the kernel for dq."""
    spans = ["spans_tile_q", "spans_block_kv"] if problem.segments else []
    return (*_reads(problem), *spans)


def _reads(problem: AttentionProblem) -> tuple[str, ...]:
    ids = ["ids_kv"] * problem.segments
    return ("q", "k", "v", "do", "rows", *_lengths(problem), *ids)
