"""Rows that a kernel of attention's gradients owns, named as in the forward attention.

Whoever owns keys meets blocks of queries, and has rules, maps and masks with both in
each other's place. Callers: ``attention_backward_sm80``, ``attention_backward_sm90``
and what is beside these, and the variants of these names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.problem import AttentionProblem

_SWAPPED = {
    **{"q_lengths": "kv_lengths", "kv_lengths": "q_lengths"},
    **{"q_segments": "kv_segments", "kv_segments": "q_segments"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Rows that a kernel owns, named as in attention_sm80: queries are its rows.

    Attributes:
      name: "keys", "queries" or "bias"; the last one owns queries, too.
      problem: with queries and keys in each other's place if it owns keys.
      tile_q, tile_kv: own rows of a tile, other rows of a block.
    """

    name: str
    problem: AttentionProblem
    tile_q: Any
    tile_kv: Any

    @property
    def schedule(self) -> str:
        """A block for each tile, see ``AttentionSm90Config``."""
        return "grid"

    @property
    def of_keys(self) -> bool:
        return self.name == "keys"

    def of(self, operand: str) -> str:
        """The op's name of what is ``operand`` in ``problem``."""
        return _SWAPPED.get(operand, operand) if self.of_keys else operand

    def buffer(self, name: str) -> str:
        """A buffer that each side has its own of."""
        return name if self.name == "queries" else f"{name}_of_{self.name}"


def of_queries(
    problem: AttentionProblem, tile_q: Any, tile_kv: Any, name: str = "queries"
) -> Side:
    """Tiles of queries meet blocks of keys."""
    return Side(name=name, problem=problem, tile_q=tile_q, tile_kv=tile_kv)


def of_keys(problem: AttentionProblem, tile_kv: Any, block_q: Any) -> Side:
    """Tiles of keys meet blocks of queries."""
    p = problem
    mask = p.mask and (*p.mask[:2], p.mask[3], p.mask[2])
    block = p.mask_block and (p.mask_block[1], p.mask_block[0])
    swapped = dataclasses.replace(
        p,
        q_len=p.kv_len,
        kv_len=p.q_len,
        q_lengths=p.kv_lengths,
        kv_lengths=p.q_lengths,
        mask=mask,
        mask_block=block,
    )
    return Side(name="keys", problem=swapped, tile_q=tile_kv, tile_kv=block_q)
