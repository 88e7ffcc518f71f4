"""An attention as one call of the op: its operands, and how they are arranged."""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.rewrite.attention.alibi import sloped
from tracea_jax.rewrite.attention.call import AttentionCall
from tracea_jax.rewrite.attention.dims import (
    Dims,
    Factor,
    Factors,
    Labels,
)
from tracea_jax.rewrite.attention.from_end import has_one_query, seen_from_end
from tracea_jax.rewrite.attention.mask_arguments import Reader
from tracea_jax.rewrite.attention.masks import Bound, Leaf, Same, Term
from tracea_jax.rewrite.attention.output import Output
from tracea_jax.rewrite.attention.roles import Roles, Sides, positions, roles_of, size
from tracea_jax.rewrite.attention.scores import Scores
from tracea_jax.rewrite.attention.sources import Source, of_one_dtype, sources
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.view import View

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
    slopes = [x for b in scores.biases if (x := sloped(view, b, scores.keys))]
    written = (scores.lhs, scores.rhs, output.value_dims, output.dims, scores.dims)
    written += tuple(x.dims for x in slopes)
    labels = Labels(_dimensions(written, sides, scores, terms))
    if not labels.fit:
        raise Refused("its reshapes take dimensions apart unevenly")
    bounds = _length_bounds(terms, scores.keys, output.zeroed)
    lengths = [f for x in bounds for f in labels.of_all(_unknown_dims(x))]
    ids = [f for x in terms if isinstance(x, Same) for f in _shared(labels, x)]
    of_sinks = labels.of_all(scores.sink.dims) if scores.sink else ()
    of_slopes = labels.of_all(tuple(d for x in slopes for d in x.dims))
    roles = roles_of(
        labels,
        sides,
        hint,
        [*lengths, *ids],
        {*of_sinks, *of_slopes}.difference(labels.of(hint)),
        one_query=has_one_query(terms, scores.keys),
    )
    _check_sizes(roles)
    if not set(of_sinks) <= {*roles.heads, *roles.groups}:
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
    call = AttentionCall(
        view=view,
        labels=labels,
        roles=roles,
        scores=scores,
        output=output,
        terms=terms,
        seen=seen,
        zeroed=zeroed,
    )
    return call.match(operands, equations)


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
    """The positions that a mask compares with those of keys.

    Heads that share keys mostly share masks of theirs, too: what else a mask varies
    along are positions.
    """
    for term in terms:
        along = dict(term.linear.positions) if isinstance(term, Bound) else {}
        if along.pop(sides.keys, 0) and len(along) == 1:
            (other,) = along
            if _axes((other,)) <= sides.own:
                return other
    keys = _axes((sides.keys,))
    for dims in (x for term in terms for x in _varying(term)):
        own = [d for d in dims if d and _axes((d,)) <= sides.own]
        if len(own) == 1 and (keys & _axes(dims) or len(dims) > 1):
            return own[0]
    return ()


def _varying(term: Term) -> list[Dims]:
    """Dimensions of what a term compares, or of the boolean that it is."""
    if isinstance(term, Same):
        return [term.a.dims, term.b.dims]
    return [term.dims] if isinstance(term, Leaf) else []


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
