"""Putting calls of our ops in place of the equations that matches name.

Each site becomes one equation of ``choice_p``: our call, and beside it what the user
wrote. ``splice`` calls ``replaced`` for one jaxpr; matches are found there, and nested
jaxprs walked.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from tracea_jax import _compat, dispatch
from tracea_jax.ops.common import choice, lowering
from tracea_jax.ops.common.programs import Call, calls_in, is_composite
from tracea_jax.rewrite import parts
from tracea_jax.rewrite.chain import ChainMatch, chains, may_begin, with_sources
from tracea_jax.rewrite.inline import Inlined
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.spliced import is_spliced
from tracea_jax.rewrite.view import Equation, View


def replaced(
    jaxpr: Any,
    view: View,
    written: Sequence[Equation],
    matches: Mapping[int, Match],
    calls: Inlined,
) -> list[Equation]:
    """The equations of a jaxpr with its matches replaced.

    Args:
      jaxpr: open; what is not about equations is taken from it.
      view: the equations as rules read them.
      written: the same equations, one by one, as the user wrote them.
      matches: by their roots.
      calls: what some of them stand for.
    """
    pieces = _chained(list(_pieces(view, written, matches)), view)
    make = functools.partial(_sites, calls) if choice.are_made() else _calls
    eqns = _needed(view, [eqn for piece in pieces for eqn in make(piece, jaxpr)])
    return calls.with_calls(eqns, view.outvars)


def is_left_to_xla(match: Match, root: Equation) -> bool:
    """Returns whether no kernel would serve a match on the device that is planned for.

    A rule asks it where a site without a kernel would be worse than the smaller sites
    in it. The answer decides about speed only.
    """
    try:
        return all(lowering.would_be_xla(*call) for call in calls_of(match, root))
    except dispatch.Unsupported:
        return False  # what was demanded cannot run here; lowering says so, if it comes


def is_served(match: Match, root: Equation) -> bool:
    """Tests whether a kernel would serve a match on the device that is planned for."""
    try:
        return not all(lowering.would_be_xla(*call) for call in calls_of(match, root))
    except dispatch.Unsupported:
        return False


def check_call(match: Match, root: Equation) -> None:
    """Traces the call of a match, which must give the results of its root.

    Raises:
      TypeError: if it does not.
    """
    jaxpr = _template(match, root).jaxpr
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    found, wanted = (
        [(x.aval.shape, x.aval.dtype) for x in results]
        for results in (jaxpr.outvars, root.outvars)
    )
    are_made = all(not isinstance(x, Literal) and x in made for x in jaxpr.outvars)
    if found != wanted or not are_made:
        raise TypeError(f"{match.site} gives {found} in place of {wanted}")


def calls_of(match: Match, root: Equation) -> list[Call]:
    """The calls of our ops that a match makes."""
    return list(calls_in(_template(match, root).jaxpr))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A site, or an equation that stays.

    Attributes:
      eqns: of our call, the last one with the site's results; or the one that stays.
      written: the user's equations for it, in order; none where one stays.
      template: of our call.
    """

    eqns: tuple[Equation, ...]
    written: tuple[Equation, ...] = ()
    template: _Template | None = None

    @property
    def users(self) -> tuple[Equation, ...]:
        """The user's equations."""
        return self.written or self.eqns


def _pieces(
    view: View, written: Sequence[Equation], matches: Mapping[int, Match]
) -> Iterator[_Piece]:
    """The program in order, each site at the place of its root.

    What is computed in vain stays, unless it needs what only a site still computes.
    """
    gone = {x for i in view.taken - matches.keys() for x in view.eqns[i].outvars}
    for index, eqn in enumerate(written):
        if index in view.vain - view.taken and not gone.isdisjoint(_variables(eqn)):
            gone.update(eqn.outvars)
            continue
        if index in matches:
            match = matches[index]
            own = tuple(written[i] for i in sorted(match.equations))
            template = _template(match, eqn)
            call = tuple(_call(template, match, eqn))
            yield _Piece(eqns=call, written=own, template=template)
        elif index not in view.taken:
            yield _Piece(eqns=(eqn,))


def _needed(view: View, eqns: Sequence[Equation]) -> list[Equation]:
    """The equations without those whose results only replaced ones have used.

    What the program itself computes in vain stays.
    """
    used = {x for x in view.outvars if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if used.isdisjoint(eqn.outvars) and not eqn.effects:
            if any(view.consumers(var) for var in eqn.outvars):
                continue
        kept.append(eqn)
        used.update([x for x in eqn.invars if not isinstance(x, Literal)])
    return kept[::-1]


# --- sites ----------------------------------------------------------------------------


def _calls(piece: _Piece, jaxpr: Any) -> Iterable[Equation]:
    """Our call alone."""
    return piece.eqns


def _sites(calls: Inlined, piece: _Piece, jaxpr: Any) -> Iterable[Equation]:
    """Our call beside the user's equations, or these where no op of ours is called.

    An op that is made of others pays without a kernel, so it stands alone.
    """
    template = piece.template
    if template is None or template.is_composite:
        return piece.eqns
    if not template.has_calls:
        return piece.written
    root, info = piece.eqns[-1], piece.eqns[-1].source_info
    results = piece.written[-1].outvars  # our call may have more
    operands = list(dict.fromkeys([*_free(piece.eqns), *_free(piece.written)]))

    def closed(eqns: Sequence[Equation]) -> Any:
        return _compat.closed_jaxpr(operands, results, eqns, like=jaxpr)

    ours = closed(piece.eqns)
    own = calls.with_calls(piece.written, results)
    if template.has_parts and lowering.may_be_partitioned():
        own = parts.in_parts(own, functools.partial(_choice_of_one, jaxpr))
    written = choice.Written(closed(own), key=template.key)
    site = root.replace(
        primitive=choice.choice_p,
        invars=operands,
        outvars=results,
        params={"ours": ours, "written": written},
        # The equations inside have the names of their scopes.
        source_info=info.replace(name_stack=type(info.name_stack)()),
    )
    return (site,)


def _choice_of_one(jaxpr: Any, match: Match, eqn: Equation) -> Equation:
    """The choice between one equation of a jaxpr and the call that it is.

    Raises:
      TypeError: if the call does not give the results of the equation.
    """
    check_call(match, eqn)
    template = _template(match, eqn)
    call = tuple(_call(template, match, eqn))
    piece = _Piece(eqns=call, written=(eqn,), template=template)
    (site,) = _sites(Inlined(eqns=[], calls=()), piece, jaxpr)
    written = dataclasses.replace(site.params["written"], is_part=True)
    return site.replace(params={**site.params, "written": written})


def _variables(eqn: Equation) -> list[Any]:
    return [x for x in eqn.invars if not isinstance(x, Literal)]


def _free(eqns: Sequence[Equation]) -> Iterator[Any]:
    """The variables that equations take from outside."""
    made = {var for eqn in eqns for var in eqn.outvars}
    for eqn in eqns:
        for x in eqn.invars:
            if not isinstance(x, Literal) and x not in made:
                yield x


# --- chains ---------------------------------------------------------------------------


def _chained(pieces: list[_Piece], view: View) -> list[_Piece]:
    """The pieces, sites that are layers in a row made one."""
    if not any(may_begin(e) for piece in pieces if piece.written for e in piece.eqns):
        return pieces
    owners = {id(e): i for i, piece in enumerate(pieces) for e in piece.eqns}
    eqns = _needed(view, [e for piece in pieces for e in piece.eqns])
    flat = View(eqns, view.outvars, {})
    stacks = [eqn.source_info.name_stack for eqn in eqns]
    flat.taken.update(i for i, stack in enumerate(stacks) if is_spliced(stack))
    kept = {id(e) for e in eqns}
    users = collections.defaultdict[Any, list[int]](list)
    for i, piece in enumerate(pieces):
        for x in _free(piece.users):
            users[x].append(i)

    def members(equations: Sequence[int]) -> list[int] | None:
        inside = {owners[id(eqns[i])] for i in equations}
        last = owners[id(eqns[max(equations)])]
        return _with_users(pieces, users, inside, last, kept)

    merged: dict[int, _Piece | None] = {}
    for match, own in chains(flat, members):
        merged |= dict.fromkeys(own)
        merged[own[-1]] = _one([pieces[i] for i in own], kept, eqns, match)
    new = [merged.get(i, piece) for i, piece in enumerate(pieces)]
    return [piece for piece in new if piece is not None]


def _with_users(
    pieces: Sequence[_Piece],
    users: Mapping[Any, Sequence[int]],
    inside: set[int],
    last: int,
    kept: set[int],
) -> list[int] | None:
    """The pieces of a chain, in order, and those that only its user's equations need.

    The user may have transposed the result of a layer for the next one, which our calls
    do not need. None if anything else needs a result of them, but for the last one's.

    Args:
      pieces: all.
      users: variables -> the pieces whose equations, as the user wrote them, take them.
      inside, last: the pieces of the chain's products, and the last of them.
      kept: identities of the equations that our calls leave.
    """
    members = set(inside)
    results = [pieces[i].eqns[-1].outvars[0] for i in inside if i != last]
    while results:
        for i in users.get(results.pop(), ()):
            piece = pieces[i]
            if i in members:
                continue
            if i > last or piece.written or id(piece.eqns[0]) in kept:
                return None
            members.add(i)
            results += piece.eqns[0].outvars
    return sorted(members)


def _one(
    members: Sequence[_Piece],
    kept: set[int],
    eqns: Sequence[Equation],
    match: ChainMatch,
) -> _Piece:
    """The piece of a chain: its call, and what its products' calls leave around it."""
    root = eqns[match.root]
    template = _template(match, root)
    (call,) = _call(template, match, root)
    call = with_sources(call, [eqns[i] for i in match.products])
    gone = {id(eqns[i]) for i in match.equations} - {id(root)}
    ours = [
        call if e is root else e
        for piece in members
        for e in piece.eqns
        if id(e) in kept and id(e) not in gone
    ]
    return _Piece(
        eqns=tuple(ours),
        written=tuple(e for piece in members for e in piece.users),
        template=template,
    )


# --- calls ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """A site's call on abstract operands, shared by all that trace alike.

    Attributes:
      jaxpr: open.
      key: what the trace depends on.
      has_calls: whether an op of ours is called.
      has_parts: whether it is a product with an epilogue, or several products.
      is_composite: whether that is an op made of others.
    """

    jaxpr: Any
    key: Hashable
    has_calls: bool
    has_parts: bool
    is_composite: bool


def _template(match: Match, root: Equation) -> _Template:
    avals = tuple(x.aval for x in match.operands)
    results = tuple(x.aval.sharding for x in root.outvars)
    return _traced(match.site, avals, results, root.ctx)


@functools.lru_cache(maxsize=512)
def _traced(
    site: Any, avals: tuple[Any, ...], results: tuple[Any, ...], context: Any
) -> _Template:
    call = _with_automatic_axes(site, results) if _are_sharded(avals) else site
    # The mesh and the like that the user's equation is under.
    with context.manager, _compat.tracing_like(avals):
        closed = jax.make_jaxpr(call)(*avals)
    assert not closed.consts, f"{site} captures arrays"
    return _Template(
        jaxpr=getattr(closed, "jaxpr", closed),
        key=(site, avals, results, context),
        has_calls=next(calls_in(closed), None) is not None,
        has_parts=any(
            planned.op in parts.OPS and not planned.is_one_operation(**params)
            for planned, _, params in calls_in(closed)
        ),
        is_composite=is_composite(closed),
    )


def _are_sharded(avals: Sequence[Any]) -> bool:
    """Whether types say how arrays are sharded over a mesh."""
    return any(axis is not None for x in avals for axis in x.sharding.spec)


def _with_automatic_axes(site: Any, results: Sequence[Any]) -> Any:
    """The site with these shardings of its results; rules split its ops."""

    def call(*operands: Any) -> list[Any]:
        return jax.tree.leaves(site(*operands))

    return lowering.with_automatic_axes(call, list(results))


def _call(template: _Template, match: Match, root: Equation) -> Iterator[Equation]:
    """The equations of a site's call, with the root's results, scope and context."""
    jaxpr = template.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, match.operands, strict=True))
    names.update(zip(jaxpr.outvars, root.outvars, strict=True))
    for eqn in jaxpr.eqns:
        outvars = []
        for var in eqn.outvars:
            if var not in names:
                names[var] = type(var)(var.aval)
            outvars.append(names[var])
        yield eqn.replace(
            invars=[x if isinstance(x, Literal) else names[x] for x in eqn.invars],
            outvars=outvars,
            source_info=root.source_info,
        )
