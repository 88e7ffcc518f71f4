"""Which tiles of scores a mask leaves: empty, partial or full.

Scores of queries (rows) and keys (columns) are computed in tiles. Rules on positions
and lengths leave each query an interval of keys whose ends only grow with the query;
which blocks of keys a tile of queries sees then follows in closed form.

    query i sees keys j with   i - left <= j <= i + right   and   j < limit

kernels/cuda/tile/key_range.cuh is the same algebra, and what kernels use; the tests
prove that both are equal, and equal to dense masks.
"""

from __future__ import annotations

import dataclasses


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
        """Whether every query of the tile sees every key of the block."""
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
        """Whether a query of first .. last sees no key.

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
