"""Rules that leave some sites as they are written, because the program is faster so.

A class of sites is an op, or what one site of the op asks: its problem, as text. Which
classes are left, ``verdicts`` knows. Callers: ``transform``, ``explain``, ``campaign``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from tracea_jax import _compat
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.programs import calls_in
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.view import View

LEFT = "the whole program was measured to be faster without"


@functools.lru_cache(maxsize=64)  # rules are part of the keys of JAX's traces
def fewer(rules: tuple[Rule, ...], without: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules with all matches of these classes turned down.

    If that is every op, there are no rules: the program stays as it is.
    """
    if not without:
        return rules
    if all(rule.op in without for rule in rules):
        return ()
    return tuple(_turning_down(rule, frozenset(without)) for rule in rules)


def _turning_down(rule: Rule, without: frozenset[str]) -> Rule:
    def match(view: View, index: int) -> Match | str | None:
        found = rule.match(view, index)
        if isinstance(found, Match):
            if rule.op in without or class_of(view, found) in without:
                return LEFT
        return found

    return dataclasses.replace(rule, match=match)


def noting(
    rules: tuple[Rule, ...], note: Callable[[str, str], None]
) -> tuple[Rule, ...]:
    """The rules; ``note`` is called with the op and the class of every match."""

    def noted(rule: Rule) -> Rule:
        def match(view: View, index: int) -> Match | str | None:
            found = rule.match(view, index)
            if isinstance(found, Match) and (name := class_of(view, found)):
                note(rule.op, name)
            return found

        return dataclasses.replace(rule, match=match)

    return tuple(map(noted, rules))


def class_of(view: View, match: Match) -> str | None:
    """The problem of a site as text; None for symbolic shapes."""
    context = view.eqns[match.root].ctx
    return _class_of(match.site, tuple(x.aval for x in match.operands), context)


@functools.lru_cache(maxsize=512)
def _class_of(site: Any, avals: tuple[Any, ...], context: Any) -> str | None:
    with context.manager, _compat.tracing_like(avals):
        jaxpr = jax.make_jaxpr(site)(*avals)
    for call in calls_in(jaxpr):
        problem = lowering.request(*call).problem
        return None if problem is None else str(problem)
    return None
