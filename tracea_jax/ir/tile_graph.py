"""Which tiles of scores a mask leaves: empty, partial or full.

Scores of queries (rows) and keys (columns) are computed in tiles. Rules on positions
and lengths leave each query an interval of keys whose ends only grow with the query;
which blocks of keys a tile of queries sees then follows in closed form.

    query i sees keys j with   i - left <= j <= i + right   and   j < limit

kernels/cuda/tile/key_range.cuh is the same algebra, and what kernels use; the tests
prove that both are equal, and equal to dense masks.

``TileGraph`` is the states of all tiles as a value that prints itself as a picture;
``tile_states`` has the states of other masks. Callers: kernels' variants, and
``masks``, which shows people what they wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from tracea_jax.ir import tile_states
from tracea_jax.ir.tile_states import EMPTY, PARTIAL
from tracea_jax.page import Page, Picture, Printable

_SIGNS = " /#"  # of the states
_WIDEST = 64  # signs in a line of a picture


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """The blocks of keys that a tile of queries sees.

    Attributes:
      first, last: blocks first .. last - 1 are seen; the others are empty.
      full_first, full_last: of them, those that are full: seen by every query. The
        others are partial.
    """

    first: int
    last: int
    full_first: int
    full_last: int

    @property
    def count(self) -> int:
        """Blocks that are seen."""
        return self.last - self.first

    def is_full(self, block: int) -> bool:
        """Returns whether every query of the tile sees every key of the block."""
        return self.full_first <= block < self.full_last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyInterval:
    """The keys that the queries of one example see.

    Attributes:
      kv_len: keys that are stored, at least 1.
      limit: of them, those that may be seen.
      left, right: query i sees keys i - left .. i + right; None for no limit.
    """

    kv_len: int
    limit: int
    left: int | None = None
    right: int | None = None

    def begin(self, query: int) -> int:
        """The first key that a query sees."""
        return 0 if self.left is None else max(0, query - self.left)

    def end(self, query: int) -> int:
        """The key behind the last one that a query sees."""
        if self.right is None:
            return self.limit
        return min(self.limit, query + self.right + 1)

    def has_blind(self, first: int, last: int) -> bool:
        """Returns whether a query of first .. last sees no key.

        The length of the interval is concave in the query: one at an end is shortest.
        """
        return any(self.end(q) <= self.begin(q) for q in (first, last))

    def blocks(self, first: int, last: int, block: int) -> BlockRange:
        """The blocks of ``block`` keys that the queries first .. last see.

        A query that sees no key takes the mean of all values, as softmax of equal
        scores does. A tile with such a query sees all blocks, each partial.
        """
        if self.has_blind(first, last):
            return BlockRange(
                first=0, last=-(-self.kv_len // block), full_first=0, full_last=0
            )
        return self.seen_blocks(first, last, block)

    def seen_blocks(self, first: int, last: int, block: int) -> BlockRange:
        """``blocks``, if queries that see no key are looked after in another way."""
        if self.end(last) <= self.begin(first):
            return BlockRange(first=0, last=0, full_first=0, full_last=0)
        seen_from, seen_to = self.begin(first) // block, -(-self.end(last) // block)
        full_from, full_to = -(-self.begin(last) // block), self.end(first) // block
        if full_from >= full_to:
            full_from = full_to = seen_from
        return BlockRange(
            first=seen_from, last=seen_to, full_first=full_from, full_last=full_to
        )

    def states(self, q_len: int, block: tuple[int, int]) -> np.ndarray:
        """States of all tiles, an array (query tiles, key tiles)."""
        rows, tiles = block[0], np.arange(-(-self.kv_len // block[1]))
        lines: list[np.ndarray] = []
        for first in range(0, q_len, rows):
            r = self.blocks(first, min(first + rows, q_len) - 1, block[1])
            seen = (r.first <= tiles) & (tiles < r.last)
            full = (r.full_first <= tiles) & (tiles < r.full_last)
            lines.append(seen.astype(np.uint8) + full)
        return np.stack(lines) if lines else np.zeros((0, tiles.size), np.uint8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TileGraph(Printable):
    """The tiles of the scores of one head, and what a mask leaves of each.

    Printed as a picture: " " is an empty tile, which costs nothing, "/" a partial one,
    and "#" a full one, whose scores need no mask. A tile that reaches behind the last
    key is partial at most. Where rules on positions leave a query no key, its tiles are
    partial: it takes the mean of all values.

    Attributes:
      q_len, kv_len: queries and keys.
      block: (queries, keys) of a tile.
      states: for each tile of queries, a byte for each tile of keys: 0 for an empty
        one, 1 for a partial one, 2 for a full one.
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    states: tuple[bytes, ...]

    @classmethod
    def of(
        cls, states: np.ndarray, q_len: int, kv_len: int, block: tuple[int, int]
    ) -> TileGraph:
        """From an array of states."""
        rows = tuple(row.tobytes() for row in states.astype(np.uint8))
        return cls(q_len=q_len, kv_len=kv_len, block=block, states=rows)

    @classmethod
    def from_mask(cls, mask: Any, block: tuple[int, int] = (128, 128)) -> TileGraph:
        """From a boolean array (queries, keys)."""
        mask = np.asarray(mask)
        q_len, kv_len = mask.shape
        return cls.of(tile_states.of_mask(np, mask, block=block), q_len, kv_len, block)

    @property
    def array(self) -> np.ndarray:
        """The states, uint8 (query tiles, key tiles)."""
        rows = [np.frombuffer(row, np.uint8) for row in self.states]
        return np.stack(rows) if rows else np.zeros((0, 0), np.uint8)

    @property
    def computed(self) -> int:
        """Tiles that are not empty."""
        return int((self.array != EMPTY).sum())

    @property
    def partial(self) -> int:
        """Tiles whose scores are masked one by one."""
        return int((self.array == PARTIAL).sum())

    def seen(self, row: int) -> tuple[int, ...]:
        """The tiles of keys that a tile of queries sees."""
        return tuple(n for n, state in enumerate(self.states[row]) if state != EMPTY)

    def __and__(self, other: TileGraph) -> TileGraph:
        """The conjunction; a tile is partial where the two may leave nothing of it.

        Raises:
          ValueError: if the tiles are others.
        """
        sizes = [(g.q_len, g.kv_len, g.block) for g in (self, other)]
        if sizes[0] != sizes[1]:
            raise ValueError("tiles of {} and of {} cannot be combined".format(*sizes))
        states = np.minimum(self.array, other.array)
        return TileGraph.of(states, self.q_len, self.kv_len, self.block)

    @property
    def page(self) -> Page:
        total = sum(map(len, self.states))
        text = (
            f"{self.q_len} queries x {self.kv_len} keys in tiles of "
            f"{self.block[0]} x {self.block[1]}: {self.computed} of {total} computed, "
            f"{self.partial} of them partial"
        )
        return Page((text, Picture(self._picture())))

    def _picture(self) -> str:
        merged = _merged(_merged(self.array).T).T
        lines = ("".join(_SIGNS[state] for state in row) for row in merged)
        return _framed(lines, merged.shape[1])


def _merged(states: np.ndarray) -> np.ndarray:
    """At most as many rows as a picture has, each for several tiles."""
    rows, tiles = states.shape
    count = max(1, -(-rows // _WIDEST))
    padded = np.pad(
        states, ((0, -rows % count), (0, 0)), mode="edge" if rows else "constant"
    )
    groups = padded.reshape(-1, count, tiles)
    low, high = groups.min(1), groups.max(1)
    return np.where(low == high, low, PARTIAL)


def _framed(lines: Iterable[str], width: int) -> str:
    edge = f"+{'-' * width}+"
    return "\n".join([edge, *(f"|{line}|" for line in lines), edge])
