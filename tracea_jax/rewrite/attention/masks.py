"""Masks as conjunctions of bounds on positions and of boolean values.

Expressions are interpreted over the positions of queries and keys, whatever their
spelling: integers as linear functions of positions, comparisons as bounds, 0/1 arrays
and large negative numbers as the booleans that they were made of. What is none of these
is a boolean value of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Literal

from tracea_jax.rewrite.attention import sliced
from tracea_jax.rewrite.attention.dims import MOVES, Dims, aligned, backward
from tracea_jax.rewrite.attention.known_masks import band_of, is_table, table
from tracea_jax.rewrite.attention.positions import Linear, Unknown, linear
from tracea_jax.rewrite.evaluate import evaluate, is_elementwise
from tracea_jax.rewrite.view import Atom, Equation, View, remembered


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A boolean value; the mask is it, or its negation."""

    atom: Atom
    dims: Dims
    positive: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """``linear`` >= 0, with the boolean value that says so, if there is one."""

    linear: Linear
    leaf: Leaf | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Same:
    """Two integers are equal, such as the segment ids of a query and of a key."""

    a: Unknown
    b: Unknown
    leaf: Leaf = dataclasses.field(compare=False)


Term = Leaf | Bound | Same
NEVER = Bound(Linear(offset=-1.0))


@remembered
def conjuncts(
    view: View, atom: Atom, dims: Dims, positive: bool = True
) -> tuple[Term, ...]:
    """Terms that must all hold for a boolean to be true (if not positive, false).

    Args:
      view: the equations.
      atom: the boolean.
      dims: where its dimensions come from.
      positive: whether it, or its negation, is meant.
    """
    known = view.scalar(atom)
    if known is not None:
        return () if bool(known) == positive else (NEVER,)
    leaf = Leaf(atom, dims, positive)
    eqn = view.producer(atom)
    if eqn is None:
        return _from_outside(view, leaf) or _captured(view, leaf)
    found = _decomposed(view, eqn, leaf)
    return _captured(view, leaf) if found is None else found


def _decomposed(view: View, eqn: Equation, leaf: Leaf) -> tuple[Term, ...] | None:
    dims, positive = leaf.dims, leaf.positive
    name = eqn.primitive.name
    if name in MOVES:
        source = backward(eqn, dims)
        if source is None:
            return None
        return conjuncts(view, eqn.invars[0], source, positive)
    if name in ("copy", "stop_gradient", "pvary", "not"):
        same = positive != (name == "not")
        return conjuncts(view, eqn.invars[0], dims, same)
    if name == "convert_element_type":
        if eqn.invars[0].aval.dtype == bool:
            return conjuncts(view, eqn.invars[0], dims, positive)
        return _of_choice(view, eqn.invars[0], dims, positive, lambda x: x != 0)
    if name == ("and" if positive else "or"):
        return _all_of(view, eqn.invars, dims, positive)
    if name == "select_n" and len(eqn.invars) == 3:
        return _selected(view, eqn, dims, positive)
    if name in _COMPARISONS:
        return _compared(view, eqn, leaf)
    return sliced.terms_of(view, eqn, leaf, conjuncts)


def _all_of(view: View, atoms: Any, dims: Dims, positive: bool) -> tuple[Term, ...]:
    terms: list[Term] = []
    for atom in atoms:
        terms += conjuncts(view, atom, aligned(atom, dims), positive)
    return tuple(dict.fromkeys(terms))


def _selected(view: View, eqn: Equation, dims: Dims, positive: bool) -> Any:
    """A choice between a boolean and a constant, as tril of a mask is."""
    which, *cases = eqn.invars
    for place, case in enumerate(cases):
        value = view.scalar(case)
        if value is not None and bool(value) != positive:
            other = cases[1 - place]
            chosen = conjuncts(view, which, aligned(which, dims), place == 0)
            return (*chosen, *conjuncts(view, other, aligned(other, dims), positive))
    return None


def _from_outside(view: View, leaf: Leaf) -> tuple[Term, ...] | None:
    """The terms of a mask made outside of a loop, say, if positions are all it has."""
    if leaf.atom not in view.outside:
        return None
    outer, atom = view.outside[leaf.atom]
    bounds = _of_positions(conjuncts(outer, atom, leaf.dims, leaf.positive))
    return bounds and tuple(dataclasses.replace(x, leaf=leaf) for x in bounds)


def _of_positions(terms: tuple[Term, ...] | None) -> tuple[Bound, ...] | None:
    """The terms without their leaves, if they are bounds on positions."""
    bounds = tuple(
        dataclasses.replace(x, leaf=None)
        for x in terms or ()
        if isinstance(x, Bound) and not x.linear.unknowns
    )
    return bounds if terms is not None and len(bounds) == len(terms) else None


def _captured(view: View, leaf: Leaf) -> tuple[Term, ...]:
    """The bounds of a known mask that is a band along the diagonal, or itself."""
    value = table(view, leaf.atom) if is_table(leaf.dims) else None
    if value is None:
        return (leaf,)
    bounds = band_of(value == leaf.positive, leaf.dims)
    return (leaf,) if bounds is None else tuple(Bound(x, leaf) for x in bounds)


# --- comparisons ----------------------------------------------------------------------

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("eq", "ge", "gt", "le", "lt", "ne")
}
_NEGATED = {"eq": "ne", "ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "ne": "eq"}


def _compared(view: View, eqn: Equation, leaf: Leaf) -> tuple[Term, ...] | None:
    a, b = eqn.invars
    name = eqn.primitive.name
    if a.aval.dtype == bool:
        return None
    known = view.scalar(b)
    if known is not None:
        compare = _COMPARISONS[name]
        test = functools.partial(lambda y, x: bool(compare(x, y)), known)
        found = _of_choice(view, a, leaf.dims, leaf.positive, test)
        if found is not None:
            return tuple(_with_leaf(x, leaf) for x in found)
    name = name if leaf.positive else _NEGATED[name]
    distances = _differences(view, eqn, leaf.dims, name)
    if name == "eq" and distances and (same := _same(distances[0], leaf)):
        return (same,)
    bounds = [x for d in distances for x in _bounds(name, d)] if distances else []
    return tuple(Bound(x, leaf) for x in bounds) or None


def _with_leaf(term: Term, leaf: Leaf) -> Term:
    """The term with the boolean that says it, where that was out of reach."""
    missing = isinstance(term, Bound) and term.leaf is None
    return dataclasses.replace(term, leaf=leaf) if missing else term


def _differences(
    view: View, eqn: Equation, dims: Dims, name: str
) -> list[Linear] | None:
    """a - b, as linear functions; for |x| - b both signs, if b is above."""
    a, b = eqn.invars
    inner = view.producer(a, "abs")
    right = linear(view, b, aligned(b, dims))
    if inner is not None and right is not None and name in ("le", "lt"):
        x = linear(view, inner.invars[0], aligned(inner.invars[0], dims))
        if x is None or not x.times(-1).fits(a.aval.dtype):
            return None
        return [x - right, x.times(-1) - right]
    left = linear(view, a, aligned(a, dims))
    return None if left is None or right is None else [left - right]


def _same(x: Linear, leaf: Leaf) -> Same | None:
    """x == 0, where x is the difference of two unknown integers."""
    by_sign = {sign: unknown for unknown, sign in x.unknowns}
    if len(x.unknowns) != 2 or by_sign.keys() != {1, -1}:
        return None
    return None if x.positions or x.offset else Same(by_sign[1], by_sign[-1], leaf)


def _bounds(name: str, x: Linear) -> list[Linear]:
    """x compared with 0, as bounds; x is an integer but for its offset."""
    flipped = x.times(-1)
    match name:
        case "ge":
            return [x.rounded(math.floor)]
        case "le":
            return [flipped.rounded(math.floor)]
        case "gt":
            return [x.rounded(math.ceil) + -1]
        case "lt":
            return [flipped.rounded(math.ceil) + -1]
        case "eq" if x.offset == int(x.offset):
            return [x, flipped]
    return []


# --- numbers that are one of two ------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """``true`` where all of the booleans, of ``view``, hold, else ``false``."""

    view: View
    which: tuple[Leaf, ...]
    false: float
    true: float

    def zero_or_one(self) -> tuple[Leaf, ...] | None:
        """Leaves that must all hold for it to be 1, if it is 0 otherwise."""
        if (self.false, self.true) == (0, 1):
            return self.which
        if (self.false, self.true) == (1, 0) and len(self.which) == 1:
            (leaf,) = self.which
            return (dataclasses.replace(leaf, positive=not leaf.positive),)
        return None

    def terms(self, view: View, positive: bool = True) -> tuple[Term, ...] | None:
        """Terms of a conjunction that is ``true`` (or ``false``), or None."""
        if not positive and len(self.which) != 1:
            return None
        terms: list[Term] = []
        for leaf in self.which:
            same = leaf.positive == positive
            terms += conjuncts(self.view, leaf.atom, leaf.dims, same)
        found = tuple(dict.fromkeys(terms))
        return found if self.view is view else _of_positions(found)


@remembered
def choice(view: View, atom: Atom, dims: Dims) -> Choice | None:
    """A number that is one of two, if that is known."""
    if isinstance(atom, Literal):
        return None
    if atom.aval.dtype == bool:
        return Choice(view, (Leaf(atom, dims),), 0.0, 1.0)
    eqn = view.producer(atom)
    if eqn is None:
        outer = view.outside.get(atom)
        return None if outer is None else choice(*outer, dims)
    name = eqn.primitive.name
    if name in MOVES:
        source = backward(eqn, dims)
        return None if source is None else choice(view, eqn.invars[0], source)
    if name in ("copy", "stop_gradient", "pvary"):
        return choice(view, eqn.invars[0], dims)
    if name == "select_n" and len(eqn.invars) == 3:
        which, *cases = eqn.invars
        values = [view.scalar(x) for x in cases]
        if which.aval.dtype != bool or None in values:
            return None
        return Choice(view, (Leaf(which, aligned(which, dims)),), *values)  # type: ignore
    return _calculated(view, eqn, dims) if is_elementwise(eqn) else None


def _calculated(view: View, eqn: Equation, dims: Dims) -> Choice | None:
    """The result of an equation of a choice and numbers, or of two choices."""
    known = [view.scalar(x) for x in eqn.invars]
    unknown = [x for x, value in zip(eqn.invars, known, strict=True) if value is None]
    choices = [choice(view, x, aligned(x, dims)) for x in unknown]
    match choices:
        case [Choice() as x]:
            cases = [
                _evaluated(eqn, [side if v is None else v for v in known])
                for side in (x.false, x.true)
            ]
            false, true = cases
            if false is None or true is None:
                return None
            return Choice(x.view, x.which, false, true)
        case [Choice() as x, Choice() as y] if eqn.primitive.name in ("mul", "min"):
            first, second = x.zero_or_one(), y.zero_or_one()
            if x.view is y.view and first is not None and second is not None:
                return Choice(x.view, (*first, *second), 0.0, 1.0)
    return None


def _evaluated(eqn: Equation, numbers: list[Any]) -> float | None:
    pairs = zip(numbers, eqn.invars, strict=True)
    value = evaluate(eqn, *(np.asarray(v, x.aval.dtype) for v, x in pairs))
    return None if value is None else float(value)


def _of_choice(
    view: View, atom: Atom, dims: Dims, positive: bool, test: Callable[[float], bool]
) -> tuple[Term, ...] | None:
    """Entries for which a test of a number that is one of two comes out as wanted."""
    found = choice(view, atom, aligned(atom, dims))
    if found is None:
        return None
    at_false, at_true = test(found.false) == positive, test(found.true) == positive
    if at_false == at_true:
        return () if at_true else (NEVER,)
    return found.terms(view, positive=at_true)
