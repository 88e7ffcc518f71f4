"""Masks of queries at the end of a cache: causal, and windows, from a length on.

Queries i = 0 .. T - 1 that are decoded at position n see keys j with

    j <= n + i    and perhaps    j >= n + i - left

with n known at run time only. Counted from the end of the n + T keys that there are,
the last query stands at the last key: the mask is causal there, with a window. Other
masks are read by ``mask_arguments``. Caller: ``op_call``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tracea_jax.rewrite.attention.dims import Factors
from tracea_jax.rewrite.attention.mask_arguments import Lengths, Reader, Seen
from tracea_jax.rewrite.attention.masks import Bound, Term
from tracea_jax.rewrite.attention.positions import Unknown


@dataclasses.dataclass(frozen=True, slots=True)
class _Moving:
    """sign * (own * query + unknown - key) + offset >= 0, ``own`` 0 or 1."""

    sign: int
    own: int
    unknown: Unknown
    offset: int


def has_one_query(terms: Iterable[Term], keys: Factors) -> bool:
    """Returns whether a window begins at the same key for all that looks like a query.

    Then there is one query: what else the products repeat is heads.
    """
    bounds = [x.linear for x in terms if isinstance(x, Bound)]
    if not all(set(dict(x.positions)) <= {keys} for x in bounds):
        return False

    def moving(sign: int) -> set[Unknown]:
        """The unknowns that bounds of the keys move with."""
        return {
            unknown
            for x in bounds
            for unknown, factor in x.unknowns
            if len(x.unknowns) == 1
            and factor == sign
            and dict(x.positions) == {keys: -sign}
        }

    return bool(moving(1) & moving(-1))


def seen_from_end(reader: Reader, terms: Iterable[Term]) -> Seen | None:
    """All terms as arguments that count from the end; None if they are no such mask."""
    moving: list[_Moving] = []
    for term in dict.fromkeys(terms):
        if not isinstance(term, Bound):
            return None
        if _is_always_true(reader, term):
            continue
        found = _moving(reader, term)
        if found is None:
            return None
        moving.append(found)
    if not reader.lengths_fit or len({x.unknown for x in moving}) != 1:
        return None
    return _seen(reader, moving)


def _seen(reader: Reader, moving: Sequence[_Moving]) -> Seen | None:
    t = reader.t
    many = t > 1
    everyone = [x.offset for x in moving if (x.sign, x.own) == (1, 0)]
    ahead = [x.offset for x in moving if x.sign == 1 and x.own == many]
    behind = [x.offset for x in moving if x.sign == -1]
    if not ahead or any(x.own != many for x in moving if x.sign == -1):
        return None
    last = min(ahead)
    # Keys that exist, for all queries alike: those that the last query sees, or more.
    if many and any(offset < last + t - 1 for offset in everyone):
        return None
    left = min((last + offset for offset in behind), default=None)
    if left is not None and left < 0 or not (many or behind):
        return None
    return Seen(
        left=left,
        right=0,
        kv_lengths=Lengths(moving[0].unknown, last + t),
        from_end=True,
    )


def _moving(reader: Reader, term: Bound) -> _Moving | None:
    x = term.linear
    along, unknowns = dict(x.positions), list(x.unknowns)
    i, j = along.pop(reader.queries, 0), along.pop(reader.keys, 0)
    if along or len(unknowns) != 1 or abs(j) != 1 or x.offset != int(x.offset):
        return None
    (unknown, factor) = unknowns[0]
    if factor != -j or i not in (0, -j):
        return None
    return _Moving(-j, abs(i), unknown, int(x.offset))


def _is_always_true(reader: Reader, term: Bound) -> bool:
    """Returns whether a bound on known positions holds for all of them."""
    x = term.linear
    if x.unknowns:
        return False
    along = dict(x.positions)
    i, j = along.pop(reader.queries, 0), along.pop(reader.keys, 0)
    least = min(0, i * (reader.t - 1)) + min(0, j * (reader.s - 1)) + x.offset
    return not along and least >= 0
