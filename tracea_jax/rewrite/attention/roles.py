"""Which dimensions of attention are batch, heads, queries, keys and the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from tracea_jax.rewrite.attention.dims import Dims, Factor, Factors, Labels, merged

Group = tuple[Factor, ...]
_MOST_GROUPS = 64  # of heads that share keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Dimensions of the operands and of what is made of them.

    Attributes:
      q, k, v: of the arrays as the op takes them.
      scores: of the softmax's operand.
      keys: what the softmax sums over.
      own: axes that only queries have in the first product: positions and groups.
      width: axes that it contracts.
    """

    q: Dims
    k: Dims
    v: Dims
    scores: Dims
    keys: Factors
    own: frozenset[int]
    width: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The labels of each dimension of the op's operands.

    q is (batch, queries, heads + groups, width), k and v (batch, keys, heads, width or
    values), scores (batch, heads + groups, queries, keys).
    """

    batch: Group
    queries: Group
    heads: Group
    groups: Group
    keys: Group
    width: Group
    values: Group

    @property
    def for_queries(self) -> tuple[Group, ...]:
        return self.batch, self.queries, self.heads + self.groups, self.width

    @property
    def for_keys(self) -> tuple[Group, ...]:
        return self.batch, self.keys, self.heads, self.width

    @property
    def for_values(self) -> tuple[Group, ...]:
        return self.batch, self.keys, self.heads, self.values

    @property
    def for_result(self) -> tuple[Group, ...]:
        return self.batch, self.queries, self.heads + self.groups, self.values

    @property
    def for_scores(self) -> tuple[Group, ...]:
        return self.batch, self.heads + self.groups, self.queries, self.keys


def size(group: Iterable[Factor]) -> int:
    return math.prod(x.size for x in group)


def roles_of(
    labels: Labels,
    sides: Sides,
    hint: Factors,
    lengths: Iterable[Factor],
    of_heads: Iterable[Factor] = (),
    *,
    one_query: bool = False,
) -> Roles:
    """The roles of all labels.

    Args:
      labels: the parts of all dimensions.
      sides: the operands.
      hint: positions of queries, if the mask tells; else empty.
      lengths: labels that numbers of keys or queries depend on: batch, if possible.
      of_heads: labels that are heads', as sinks depend on them.
      one_query: whether the mask tells that there is one query.

    Several axes that only queries have may be positions or groups of heads that share
    keys; without a mask both readings are right. The largest is taken for the
    positions, and the one next to the keys in the scores among several; but if a
    dimension of size one is there, that is the only query's.
    """
    q, k, v = (labels.of_all(x) for x in (sides.q, sides.k, sides.v))
    keys = labels.of(sides.keys)
    outer = [x for x in labels.of_all(sides.scores) if x not in keys]
    shared = [x for x in outer if x in k or x in v]
    free = [x for x in outer if x not in shared]
    heads_only = set(of_heads)
    own = [x for x in free if x.axis in sides.own and x not in heads_only]
    own = [] if one_query else own
    queries = _queries(labels, sides, hint, own)
    groups = [x for x in free if x not in queries]
    batch, heads = _split(shared, set(lengths), heads_only, q, queries)
    width = [x for x in (*q, *k) if x.axis in sides.width]
    return Roles(
        batch=batch,
        queries=queries,
        heads=heads,
        groups=_sorted(groups, q),
        keys=keys,
        width=tuple(dict.fromkeys(width)),
        values=tuple(x for x in v if x not in keys and x not in shared),
    )


def _queries(
    labels: Labels, sides: Sides, hint: Factors, candidates: Sequence[Factor]
) -> Group:
    hinted = labels.of(hint)
    if hinted and set(hinted) <= set(candidates):
        return hinted
    axes = {f.axis for f in sides.keys}
    of_keys = [any(f.axis in axes for f in d) for d in sides.scores].index(True)
    found = [tuple(x for x in labels.of(d) if x in candidates) for d in sides.scores]
    is_single = of_keys > 0 and sides.scores[of_keys - 1] == ()
    if is_single and size(x for d in found for x in d) <= _MOST_GROUPS:
        return ()

    def merit(place: int) -> tuple[int, int]:
        return size(found[place]), place in (of_keys - 1, of_keys + 1)

    return found[max(range(len(found)), key=merit)]


def _split(
    shared: Sequence[Factor],
    lengths: set[Factor],
    of_heads: set[Factor],
    q: Group,
    queries: Group,
) -> tuple[Group, Group]:
    """Batch and heads. In scores, (batch, heads, queries, keys) is the usual order."""
    if lengths and lengths <= set(shared):
        batch = [x for x in shared if x in lengths]
    elif not of_heads.isdisjoint(shared):
        batch = [x for x in shared if x not in of_heads]
    elif len(shared) > 1:
        batch = shared[:-1]
    else:  # where it lies in memory
        inner = [x for x in shared if x in q and set(queries) & set(q[: q.index(x)])]
        batch = [x for x in shared if x not in inner]
    return tuple(batch), tuple(x for x in shared if x not in batch)


def _sorted(labels: Sequence[Factor], *sources: Group) -> Group:
    """Labels in the order in which they lie in memory."""
    order = [x for source in sources for x in source if x in labels]
    return tuple(dict.fromkeys((*order, *labels)))


def positions(roles: Roles) -> Factors:
    """The positions of queries, as masks name them."""
    return merged(roles.queries)
