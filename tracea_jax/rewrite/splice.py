"""Finding sites in a jaxpr, and in every jaxpr inside it, and having them replaced.

Only equations that a rule matched change, and the policies of rematerialisation that
must know our ops; everything else is kept as it is: results, effects, names of scopes,
shardings, donation. A jaxpr in which nothing matched stays the same object.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from tracea_jax import _compat
from tracea_jax._compat import ClosedJaxpr
from tracea_jax.faults import reported
from tracea_jax.ops.common.choice import choice_p
from tracea_jax.ops.common.remat import remat_policy
from tracea_jax.rewrite.inline import inlined
from tracea_jax.rewrite.match import Match, Miss, Rule, Viewed, described
from tracea_jax.rewrite.ones import without_ones
from tracea_jax.rewrite.replace import check_call, replaced
from tracea_jax.rewrite.spliced import is_spliced
from tracea_jax.rewrite.view import Atom, Equation, View

# Their bodies are not what runs under differentiation, or not ours to read.
OPAQUE = frozenset(
    {"pallas_call", "custom_vjp_call", "custom_vjp_call_jaxpr", choice_p.name}
)


def splice(
    jaxpr: Any,
    rules: Sequence[Rule],
    misses: list[Miss],
    known: Mapping = {},
    outside: Mapping = {},
) -> Any:
    """The jaxpr with all matches replaced; the same object if there are none.

    Args:
      jaxpr: open or closed.
      rules: in the order of their preference.
      misses: receives what was left, with reasons.
      known: values of variables that are known while tracing.
      outside: inputs that always have one value of an enclosing jaxpr, with it.
    """
    if ClosedJaxpr is not Jaxpr and isinstance(jaxpr, ClosedJaxpr):  # before jax 0.11
        values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        inner = splice(jaxpr.jaxpr, rules, misses, {**known, **values}, outside)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    try:
        return _spliced(jaxpr, rules, misses, known, outside)
    except Exception as e:
        anchors = {name for rule in rules for name in rule.anchors}
        misses += _failed("layer", anchors, jaxpr.eqns, e)
        return jaxpr


def _spliced(
    jaxpr: Any,
    rules: Sequence[Rule],
    misses: list[Miss],
    known: Mapping,
    outside: Mapping,
) -> Any:
    """The same for an open jaxpr, or one that has its constants."""
    values = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=False))

    def viewed(eqns: Sequence[Equation]) -> View:
        return _viewed(eqns, jaxpr.outvars, {**known, **values}, outside)

    calls = inlined(jaxpr.eqns)
    flat: Sequence[Equation] = calls.eqns
    for rule in rules:
        flat = _prepared(rule, flat, jaxpr.outvars, viewed, misses)
    view = viewed(flat)
    # Their operands and results stay, so the view is still right.
    own = [_descend(eqn, rules, misses, view) for eqn in flat]
    changed = {id(a): b for a, b in zip(flat, own, strict=True) if a is not b}
    view.eqns = [changed.get(id(eqn), eqn) for eqn in view.eqns]
    matches = find(view, rules, misses)
    if matches:
        return jaxpr.replace(eqns=replaced(jaxpr, view, own, matches, calls))
    if flat is calls.eqns and not changed:
        return jaxpr
    return jaxpr.replace(eqns=calls.with_calls(own, jaxpr.outvars))


def _viewed(
    eqns: Sequence[Equation], outvars: Sequence[Atom], known: Mapping, outside: Mapping
) -> View:
    """The equations as rules read them; their number and order stay."""
    view = View(eqns, outvars, known)
    view.outside.update(outside)
    plain = without_ones(view)
    if plain is not view.eqns:
        view = View(plain, outvars, known)
        view.outside.update(outside)
    return view


def _prepared(
    rule: Rule,
    eqns: Sequence[Equation],
    outvars: Sequence[Atom],
    viewed: Viewed,
    misses: list[Miss],
) -> Sequence[Equation]:
    """The equations as a rule would have them; as they are if it fails."""
    if rule.prepare is None:
        return eqns
    try:
        return rule.prepare(rule, eqns, outvars, viewed)
    except Exception as e:
        misses += _failed(rule.op, rule.anchors, eqns, e)
        return eqns


def _failed(
    op: str, anchors: Collection[str], eqns: Iterable[Equation], error: Exception
) -> Iterator[Miss]:
    """The miss of a whole jaxpr, at the first place where a site may begin."""
    reason = reported(op, error)
    places = (eqn for eqn in eqns if eqn.primitive.name in anchors)
    return (_miss(op, eqn, reason) for eqn in itertools.islice(places, 1))


def find(view: View, rules: Sequence[Rule], misses: list[Miss]) -> dict[int, Match]:
    """The matches of one jaxpr by their roots; no equation belongs to two."""
    matches: dict[int, Match] = {}
    for rule in rules:
        for index, eqn in enumerate(view.eqns):
            if eqn.primitive.name not in rule.anchors or index in view.taken:
                continue
            if is_spliced(eqn.source_info.name_stack):  # and left, for a reason
                continue
            found = _matched(rule, view, index, matches)
            if isinstance(found, Match):
                _accept(view, matches, found)
            elif found is not None:
                misses.append(_miss(rule.op, eqn, found))
    return matches


def _matched(
    rule: Rule, view: View, index: int, matches: Mapping[int, Match]
) -> Match | str | None:
    """A rule's result for an equation, if the match can be replaced.

    Expressions are read by recursion.
    """
    try:
        found = rule.match(view, index)
        if isinstance(found, Match):
            if not _is_free(view, matches, found):
                return None
            check_call(found, view.eqns[found.root])
        return found
    except RecursionError:
        return "it is computed by more equations in a row than can be followed"
    except Exception as e:
        return reported(rule.op, e)


def _is_free(view: View, matches: Mapping[int, Match], found: Match) -> bool:
    """True if no other match, nor anything else, needs what a match would replace.

    What it reads must remain: results of earlier matches, and nothing inside of one.
    """
    gone = (view.taken - matches.keys()) | found.equations
    return (
        not found.equations & view.taken
        and view.are_interior(found.equations, found.root)
        and all(view.producer_index(x) not in gone for x in found.operands)
    )


def _accept(view: View, matches: dict[int, Match], found: Match) -> None:
    view.taken |= found.equations
    matches[found.root] = found
    for atom in found.operands:  # perhaps from before a transposition
        view.use(atom, found.root)


def _miss(op: str, eqn: Equation, reason: str) -> Miss:
    scope = scope_of(eqn)
    return Miss(op=op, scope=scope, what=described(eqn), reason=reason)


def scope_of(eqn: Equation) -> str:
    """The names of the scopes that an equation was traced in."""
    return str(eqn.source_info.name_stack)


# --- nested jaxprs --------------------------------------------------------------------


def _descend(
    eqn: Equation, rules: Sequence[Rule], misses: list[Miss], view: View
) -> Equation:
    """The equation with the jaxprs among its parameters spliced."""
    if eqn.primitive.name in OPAQUE or is_spliced(eqn.source_info.name_stack):
        return eqn
    changed = {}
    for name, value in eqn.params.items():
        if type(value) in _PLAIN or not _holds_jaxprs(value):
            continue
        inside = functools.partial(_splice_inside, eqn, rules, misses, view)
        new = _map_jaxprs(inside, value)
        if new is not value:
            changed[name] = new
    if changed and eqn.params.get("policy") is not None:
        changed["policy"] = remat_policy(eqn.params["policy"])
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def _splice_inside(eqn, rules, misses, view, jaxpr):
    known, outside = {}, {}
    for inner, atom in _same_inside(eqn, jaxpr):
        value = view.known(atom)
        if value is not None:
            known[inner] = value
        else:
            outside[inner] = (view, atom)
    return splice(jaxpr, rules, misses, known, outside)


_JAXPRS = (Jaxpr, ClosedJaxpr)
_PLAIN = frozenset({int, float, bool, str, type(None)})  # most parameters, told quickly


def _holds_jaxprs(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_jaxprs(v) for v in value if type(v) not in _PLAIN)
    return isinstance(value, _JAXPRS)


def _map_jaxprs(f: Any, value: Any) -> Any:
    """``value`` with f applied to the jaxprs in it; the same object if f changed none.

    Some parameters are named tuples of jaxprs.
    """
    if isinstance(value, _JAXPRS):
        return f(value)
    if not isinstance(value, tuple):
        return value
    new = [_map_jaxprs(f, v) for v in value]
    if all(a is b for a, b in zip(new, value, strict=True)):
        return value
    return type(value)(*new) if hasattr(value, "_fields") else tuple(new)


def _same_inside(eqn: Equation, jaxpr: Any) -> Iterator[tuple[Any, Atom]]:
    """Inputs of a nested jaxpr that always have one value, and this outside.

    Masks are often made outside of a loop, of positions or of captured arrays.
    """
    invars = jaxpr.invars if hasattr(jaxpr, "invars") else jaxpr.jaxpr.invars
    outer: Sequence[Any] = ()
    match eqn.primitive.name:
        case "jit" | "pjit" | "remat2" | "checkpoint" | "custom_jvp_call":
            outer = eqn.invars
        case "cond":
            outer = eqn.invars[1:]
        case "scan":
            outer = eqn.invars[: _compat.scan_constants(eqn.params)]
        case "shard_map":  # what is not split
            specs = zip(invars, eqn.invars, eqn.params["in_specs"], strict=True)
            return iter([(x, atom) for x, atom, spec in specs if not any(spec)])
    return zip(invars, outer, strict=False)
