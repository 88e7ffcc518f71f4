"""An attention as one call of the op: its operands, and how they are arranged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracea_jax.rewrite.attention.dims import (
    Arrange,
    Dims,
    Factor,
    Factors,
    Labels,
    arrange,
)
from tracea_jax.rewrite.attention.from_end import has_one_query, seen_from_end
from tracea_jax.rewrite.attention.mask_arguments import Lengths, Reader, Seen
from tracea_jax.rewrite.attention.masks import Bound, Leaf, Same, Term
from tracea_jax.rewrite.attention.output import Output
from tracea_jax.rewrite.attention.roles import Roles, Sides, positions, roles_of, size
from tracea_jax.rewrite.attention.scores import Scores
from tracea_jax.rewrite.attention.site import AttentionSite
from tracea_jax.rewrite.attention.sliced import Within, arranged
from tracea_jax.rewrite.attention.sources import Source, of_one_dtype, sources
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.replace import is_left_to_xla
from tracea_jax.rewrite.view import Atom, View

_ALL = (0, 1, 2, 3)
_WIDEST = 512  # two products with a softmax between them are better for wider ones


def call_of(
    view: View,
    scores: Scores,
    output: Output,
    terms: tuple[Term, ...],
    equations: frozenset[int],
) -> Match:
    """The call of the op.

    Args:
      view: the equations.
      scores, output: the parts.
      terms: the mask.
      equations: indices of all that it replaces.

    Raises:
      Refused: if the op cannot compute this.
    """
    operands, sides = _operands(view, scores, output)
    hint = _hint(terms, sides)
    written = (scores.lhs, scores.rhs, output.value_dims, output.dims, scores.dims)
    labels = Labels(_dimensions(written, sides, scores, terms))
    if not labels.fit:
        raise Refused("its reshapes take dimensions apart unevenly")
    bounds = _length_bounds(terms, scores.keys, output.zeroed)
    lengths = [f for x in bounds for f in labels.of_all(_unknown_dims(x))]
    ids = [f for x in terms if isinstance(x, Same) for f in _shared(labels, x)]
    of_heads = labels.of_all(scores.sink.dims) if scores.sink else ()
    roles = roles_of(
        labels,
        sides,
        hint,
        [*lengths, *ids],
        of_heads,
        one_query=has_one_query(terms, scores.keys),
    )
    _check_sizes(roles)
    if not set(of_heads) <= {*roles.heads, *roles.groups}:
        raise Refused("its sinks are not one for each head")
    reader = Reader(
        queries=positions(roles),
        keys=scores.keys,
        t=size(roles.queries),
        s=size(roles.keys),
        zeroed=output.zeroed,
        lengths_fit=set(lengths) <= set(roles.batch),
        of_queries=frozenset((*roles.batch, *roles.queries)),
        of_keys=frozenset((*roles.batch, *roles.keys)),
        labels=labels,
    )
    seen = None if output.zeroed else seen_from_end(reader, terms)
    seen = seen or reader.read(terms)
    if output.zeroed is not None and seen.q_lengths is None:
        raise Refused("its result is masked in another way than its scores")
    zeroed = bool(output.repeated) and not reader.always_something(seen)
    if zeroed:
        seen = reader.booleans(terms)
    call = _Call(view, labels, roles, scores, output, seen)
    return call.match(operands, zeroed, equations)


def _operands(view: View, scores: Scores, output: Output) -> tuple[list[Source], Sides]:
    """Arrays of queries, keys and values with their dimensions."""
    dot = view.eqns[scores.dot]
    pairs = [(dot.invars[0], scores.lhs), (dot.invars[1], scores.rhs)]
    axes = [_axes(dims) for _, dims in pairs]
    keys = _axes((scores.keys,))
    if keys <= axes[0] & axes[1]:
        raise Refused("the softmax is over a dimension that queries and keys share")
    if keys <= axes[0]:
        pairs, axes = pairs[::-1], axes[::-1]
    elif not keys <= axes[1]:
        raise Refused("the softmax is over positions of queries and of keys")
    candidates = [sources(view, *pair, scaled=True) for pair in pairs]
    values = sources(view, output.values, output.value_dims, scaled=False)
    q, k, v = of_one_dtype([*candidates, values])
    own = axes[0] - axes[1]
    if _axes(v.dims) & own:
        raise Refused("each query has values of its own")
    sides = Sides(
        q=q.dims,
        k=k.dims,
        v=v.dims,
        scores=scores.dims,
        keys=scores.keys,
        own=frozenset(own),
        width=frozenset(axes[0] & axes[1] - _axes(scores.dims)),
    )
    return [q, k, v], sides


def _axes(dims: Dims) -> set[int]:
    return {f.axis for d in dims for f in d}


def _dimensions(
    written: Sequence[Dims], sides: Sides, scores: Scores, terms: Sequence[Term]
) -> list[Factors]:
    """All dimensions of all values that the op is given."""
    dims = [*written, sides.q, sides.k, sides.v, *(b.dims for b in scores.biases)]
    dims.append((scores.keys,))
    if scores.sink is not None:
        dims.append(scores.sink.dims)
    for term in terms:
        leaf = term if isinstance(term, Leaf) else term.leaf
        if leaf is not None:
            dims.append(leaf.dims)
        if isinstance(term, Same):
            dims += [term.a.dims, term.b.dims]
        if isinstance(term, Bound):
            dims.append(tuple(x for x, _ in term.linear.positions))
            dims += [x.dims for x, _ in term.linear.unknowns]
    return [d for each in dims for d in each]


# --- what masks tell about dimensions -------------------------------------------------


def _hint(terms: Sequence[Term], sides: Sides) -> Factors:
    """The positions that a mask compares with those of keys."""
    for term in terms:
        along = dict(term.linear.positions) if isinstance(term, Bound) else {}
        if along.pop(sides.keys, 0) and len(along) == 1:
            (other,) = along
            if _axes((other,)) <= sides.own:
                return other
    return ()


def _length_bounds(
    terms: Sequence[Term], keys: Factors, zeroed: Bound | None
) -> list[Bound]:
    """Those that are numbers of keys, or of queries."""
    return [
        term
        for term in terms
        if isinstance(term, Bound)
        and len(term.linear.unknowns) == 1
        and (dict(term.linear.positions) == {keys: -1} or term == zeroed)
    ]


def _shared(labels: Labels, same: Same) -> set[Factor]:
    """The labels of both integers: batch."""
    return set(labels.of_all(same.a.dims)) & set(labels.of_all(same.b.dims))


def _unknown_dims(bound: Bound) -> Dims:
    return tuple(d for x, _ in bound.linear.unknowns for d in x.dims)


def _check_sizes(roles: Roles) -> None:
    width = max(size(roles.width), size(roles.values))
    if width > _WIDEST:
        raise Refused(f"a head has {width} numbers, more than {_WIDEST}")


# --- the call -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    view: View
    labels: Labels
    roles: Roles
    scores: Scores
    output: Output
    seen: Seen

    def match(
        self, operands: Sequence[Source], zeroed: bool, equations: frozenset[int]
    ) -> Match:
        q, k, v = operands
        roles, seen = self.roles, self.seen
        root = self.output.root
        extra: list[Atom] = [x.atom for x in (*self.scores.biases, *seen.leaves)]
        lengths = [x for x in (seen.q_lengths, seen.kv_lengths) if x is not None]
        ids = seen.segments or ()
        site = AttentionSite(
            query=self._arrange(q.dims, roles.for_queries, _ALL),
            key=self._arrange(k.dims, roles.for_keys, _ALL),
            value=self._arrange(v.dims, roles.for_values, _ALL),
            result=self._result(),
            dtype=self.view.eqns[root].outvars[0].aval.dtype.name,
            biases=tuple(
                (self._arrange(b.dims, roles.for_scores), b.factor)
                for b in self.scores.biases
            ),
            masks=tuple(
                (self._arrange(x.dims, roles.for_scores), x.positive)
                for x in seen.leaves
            ),
            q_lengths=self._lengths(seen.q_lengths),
            kv_lengths=self._lengths(seen.kv_lengths),
            segments=tuple(
                self._arrange(x.dims, (roles.batch, positions), (0, 1))
                for x, positions in zip(ids, (roles.queries, roles.keys), strict=False)
            ),
            sinks=self._sinks(),
            scale=self.scores.scale * q.scale * k.scale,
            is_causal=seen.is_causal,
            window=seen.window(size(roles.queries), size(roles.keys)),
            soft_cap=self.scores.soft_cap,
            from_end=seen.from_end,
            zeroed=zeroed,
        )
        extra += [x.unknown.atom for x in lengths]
        extra += [x.atom for x in ids]
        if isinstance(site.sinks, Arrange):
            assert self.scores.sink is not None
            extra.append(self.scores.sink.atom)
        self._check_made(extra)
        atoms = (q.atom, k.atom, v.atom, *extra)
        match = Match(root=root, equations=equations, operands=atoms, site=site)
        self._check_pays(match)
        return match

    def _check_pays(self, match: Match) -> None:
        """Refuses what few kernels compute where none does: its products are sites."""
        width, values = size(self.roles.width), size(self.roles.values)
        what = None
        if width != values:
            what = f"a head of the keys has {width} numbers, of the values {values}"
        elif self.scores.soft_cap is not None:
            what = "its scores have a soft cap"
        elif self.scores.sink is not None:
            what = "its softmax has sinks"
        if what is not None and is_left_to_xla(match, self.view.eqns[match.root]):
            raise Refused(f"{what}, and no kernel here computes that")

    def _arrange(
        self, dims: Dims, groups: Sequence[Sequence[Factor]], whole: Sequence[int] = ()
    ) -> Arrange:
        return arrange(self.labels.of_all(dims), groups, whole)

    def _result(self) -> Arrange:
        made = [x for group in self.roles.for_result for x in group]
        return arrange(made, [self.labels.of(d) for d in self.output.dims])

    def _lengths(self, lengths: Lengths | None) -> tuple[Arrange | Within, int] | None:
        if lengths is None:
            return None
        how = self._arrange(lengths.unknown.dims, (self.roles.batch,), (0,))
        return arranged(how, lengths.unknown), lengths.offset

    def _sinks(self) -> Arrange | float | None:
        sink = self.scores.sink
        if sink is None or sink.atom is None:
            return None if sink is None else sink.value
        heads = self.roles.heads + self.roles.groups
        return self._arrange(sink.dims, (heads,), (0,))

    def _check_made(self, atoms: Sequence[Atom]) -> None:
        """Refuses masks and biases that are interior to another match."""
        if any(self.view.producer_index(x) in self.view.taken for x in atoms):
            raise Refused("its mask or bias is part of another site")
