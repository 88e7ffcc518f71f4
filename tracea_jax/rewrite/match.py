"""Results of rules: sites that replace equations, and reasons why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tracea_jax.rewrite.view import Atom, Equation, View

Viewed = Callable[[Sequence[Equation]], View]
Prepare = Callable[
    ["Rule", Sequence[Equation], Sequence[Atom], Viewed], Sequence[Equation]
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Equations that one call of an op of ours replaces.

    Attributes:
      root: index of the equation whose results the call computes.
      equations: indices of all equations that are replaced, the root included; nothing
        else uses their results but the root's.
      operands: values that the call takes, all made before the root.
      site: the call: (*operands) -> the root's results, of their shapes and dtypes.
        Hashable, and equal for calls that trace alike.
    """

    root: int
    equations: frozenset[int]
    operands: tuple[Atom, ...]
    site: Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Recogniser of one kind of site.

    Attributes:
      op: the op it becomes.
      anchors: names of the primitives where a site may begin.
      match: (view, index of an anchor) -> the match; a sentence why this anchor is no
        such site; or None if nobody would expect one here.
      after_grad: whether sites are recognised, one by one, in a program that has been
        differentiated, those of the backward pass included.
      prepare: (the rule, the equations of a jaxpr, its results, equations -> their
        view) -> equations that compute the same and have better sites, or the same
        sequence; None if the rule reads programs as they are written.
      is_expected: whether somebody would expect a site at each anchor, so that one
        where nothing may be replaced is a miss.
    """

    op: str
    anchors: frozenset[str]
    match: Callable[[View, int], Match | str | None]
    after_grad: bool = False
    prepare: (
        Callable[[Rule, Sequence[Equation], Sequence[Atom], Viewed], Any] | None
    ) = None
    is_expected: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A place that was left as it is.

    Attributes:
      op: the op it might have become.
      scope: names of the scopes it is in, as in a profile.
      what: the equation, shortly.
      reason: the first condition that failed, as a sentence.
    """

    op: str
    scope: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.scope or '-'}: {self.what} is no {self.op}: {self.reason}"


def described(eqn: Equation) -> str:
    """An equation, shortly: its primitive and the types of its operands."""
    types = ", ".join(x.aval.str_short() for x in eqn.invars)
    return f"{eqn.primitive.name}({types})"
