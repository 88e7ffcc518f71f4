"""Masks as the arguments of the op: causal, a window, lengths, segments, booleans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tracea_jax.rewrite.attention.dims import Factor, Factors, Labels
from tracea_jax.rewrite.attention.masks import NEVER, Bound, Leaf, Same, Term
from tracea_jax.rewrite.attention.positions import Unknown
from tracea_jax.rewrite.attention.steps import Refused


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """An unknown number of keys or queries: ``unknown`` + ``offset``."""

    unknown: Unknown
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Which keys a query sees: the arguments of the op.

    Attributes:
      left, right: how far before and after itself; None for no limit.
      q_lengths, kv_lengths: numbers of queries and keys.
      segments: integers of queries and of keys that must be equal.
      leaves: booleans that must hold, too.
      from_end: whether positions count from the end of the keys that there are.
    """

    left: int | None = None
    right: int | None = None
    q_lengths: Lengths | None = None
    kv_lengths: Lengths | None = None
    segments: tuple[Unknown, Unknown] | None = None
    leaves: tuple[Leaf, ...] = ()
    from_end: bool = False

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def window(self, queries: int, keys: int) -> tuple[int, int] | None:
        """``local_window_size``; what it does not limit is the length."""
        if self.left is None and self.right in (None, 0):
            return None
        left = queries if self.left is None else self.left
        return left, keys if self.right is None else self.right


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader of mask terms.

    Attributes:
      queries, keys: what positions of queries and keys are called.
      t, s: how many there are.
      zeroed: the bound outside of which the output is set to zero, if there is one.
      lengths_fit: whether lengths depend on the batch only.
      of_queries, of_keys: what labels segment ids may depend on.
      labels: the parts of all dimensions.
    """

    queries: Factors
    keys: Factors
    t: int
    s: int
    zeroed: Bound | None
    lengths_fit: bool
    of_queries: frozenset[Factor]
    of_keys: frozenset[Factor]
    labels: Labels

    def read(self, terms: Iterable[Term]) -> Seen:
        """All terms as arguments.

        Raises:
          Refused: if no key is ever seen, or a mask cannot be given to the op.
        """
        seen = Seen()
        for term in dict.fromkeys(terms):
            seen = self._with(seen, term)
        return seen

    def always_something(self, seen: Seen) -> bool:
        """Returns whether every query is sure to see a key."""
        narrow = seen.left is not None and self.t - seen.left > self.s
        unknown = seen.q_lengths or seen.kv_lengths or seen.segments or seen.leaves
        return not (unknown or narrow)

    def booleans(self, terms: Iterable[Term]) -> Seen:
        """All terms as boolean values."""
        seen = Seen()
        for term in dict.fromkeys(terms):
            leaf = term if isinstance(term, Leaf) else term.leaf
            seen = self._boolean(seen, leaf)
        return seen

    def _with(self, seen: Seen, term: Term) -> Seen:
        if isinstance(term, Leaf):
            return self._boolean(seen, term)
        if isinstance(term, Same):
            return self._segmented(seen, term)
        if term == NEVER:
            raise Refused("no key is ever seen")
        x = term.linear
        along = dict(x.positions)
        i, j = along.pop(self.queries, 0), along.pop(self.keys, 0)
        unknowns, offset = list(x.unknowns), int(x.offset)
        if not along and not unknowns:
            return self._limited(seen, term, i, j, offset)
        if not along and len(unknowns) == 1 and unknowns[0][1] == 1:
            lengths = Lengths(unknowns[0][0], offset + 1)
            fits = self.lengths_fit
            if fits and (i, j) == (0, -1) and seen.kv_lengths is None:
                return dataclasses.replace(seen, kv_lengths=lengths)
            if fits and (i, j) == (-1, 0) and term == self.zeroed:
                return dataclasses.replace(seen, q_lengths=lengths)
        return self._boolean(seen, term.leaf)

    def _segmented(self, seen: Seen, term: Same) -> Seen:
        """Ids as the op takes them, in either order; the op has one pair."""
        for q, k in ((term.a, term.b), (term.b, term.a)):
            labels = [set(self.labels.of_all(x.dims)) for x in (q, k)]
            small = all(x.atom.aval.dtype.itemsize <= 4 for x in (q, k))
            fits = labels[0] <= self.of_queries and labels[1] <= self.of_keys
            # Without a position, it is no id of a query or of a key.
            along = labels[0] - self.of_keys and labels[1] - self.of_queries
            if small and fits and along and seen.segments in (None, (q, k)):
                return dataclasses.replace(seen, segments=(q, k))
        return self._boolean(seen, term.leaf)

    def _limited(self, seen: Seen, term: Bound, i: int, j: int, offset: int) -> Seen:
        """The bound i * query + j * key + offset >= 0."""
        if min(0, i * (self.t - 1)) + min(0, j * (self.s - 1)) + offset >= 0:
            return seen  # always
        if (i, j) == (1, -1) and offset >= 0:
            right = offset if seen.right is None else min(offset, seen.right)
            return dataclasses.replace(seen, right=right)
        if (i, j) == (-1, 1) and offset >= 0:
            left = offset if seen.left is None else min(offset, seen.left)
            return dataclasses.replace(seen, left=left)
        return self._boolean(seen, term.leaf)

    def _boolean(self, seen: Seen, leaf: Leaf | None) -> Seen:
        if leaf is None:
            raise Refused("its additive mask is no boolean")
        leaves = tuple(dict.fromkeys((*seen.leaves, leaf)))
        return dataclasses.replace(seen, leaves=leaves)
