"""The division of a softmax by its sum, at once or after the product with the values.

exp(x) / sum(exp(x)) @ v and (exp(x) @ v) / sum(exp(x)) are the same function; so is a
product with 1 / sum. Callers: ``softmax``, ``output``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.dims import MOVES, Dims, backward, forward
from tracea_jax.rewrite.attention.steps import is_same, keep_of
from tracea_jax.rewrite.view import Atom, View

_DEPTH = 12  # equations between the sum and the division


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division by a sum.

    Attributes:
      total: index of the sum.
      steps: indices of the equations from it to the division, which is the last.
      numerator: what is divided.
      addition: which of the steps adds to the sum; None if none does.
    """

    total: int
    steps: tuple[int, ...]
    numerator: Atom
    addition: int | None

    @property
    def root(self) -> int:
        """Index of the equation that divides."""
        return self.steps[-1]

    def of_sum(self, view: View, dims: Dims) -> Dims | None:
        """Dimensions of the sum, from those of the quotient.

        What the sum is repeated along, they do not mention. None if its moves do not
        factor.
        """
        for step in reversed(self.steps):
            eqn = view.eqns[step]
            if eqn.primitive.name in MOVES:
                found = backward(eqn, dims)
                if found is None:
                    return None
                dims = found
        return dims

    def kept(self, view: View, dims: Dims) -> Dims:
        """Dimensions of the sum, from those of the summands."""
        axes = view.eqns[self.total].params["axes"]
        return tuple(d for i, d in enumerate(dims) if i not in axes)

    def of_addition(self, view: View, dims: Dims) -> Dims | None:
        """Dimensions of what is added to the sum, from those of the summands."""
        found: Dims | None = self.kept(view, dims)
        for step in self.steps:
            if step == self.addition or found is None:
                return found
            eqn = view.eqns[step]
            found = forward(eqn, found) if eqn.primitive.name in MOVES else found
        return None


def division_by(view: View, total: int) -> Division | None:
    """The division by a sum, which is its only use."""
    steps: list[int] = []
    addition = None
    value, inverse = view.eqns[total].outvars[0], False
    while (step := view.sole_consumer(value)) is not None and len(steps) < _DEPTH:
        eqn = view.eqns[step]
        steps.append(step)
        other = eqn.invars[0] if eqn.invars[-1] is value else eqn.invars[-1]
        name = eqn.primitive.name
        divides = name == "div" and eqn.invars[1] is value and not inverse
        if divides and view.scalar(other) == 1:
            inverse = True
        elif divides or (name == "mul" and inverse):
            return Division(
                total=total, steps=tuple(steps), numerator=other, addition=addition
            )
        elif name == "integer_pow" and eqn.params["y"] == -1 and not inverse:
            inverse = True
        elif name == "add" and addition is None and not inverse:
            addition = step
        elif name not in MOVES and not is_same(eqn):
            return None
        value = eqn.outvars[0]
    return None


def weighted_sum(view: View, division: Division, weights: set[Any]) -> Any | None:
    """Which of the weights the numerator is a product of; None if of none."""
    dot = _back(view, division.numerator, set())
    eqn = view.producer(dot, "dot_general")
    for operand in () if eqn is None else eqn.invars:
        found = _back(view, operand, weights)
        if not isinstance(found, Literal) and found in weights:
            return found
    return None


def _back(view: View, atom: Atom, until: set[Any]) -> Atom:
    """The origin of a value before moves, slices, masks and roundings."""
    for _ in range(_DEPTH):
        eqn = view.producer(atom)
        if eqn is None or atom in until:
            break
        masked = [x for x in eqn.invars if keep_of(view, eqn, x) is not None]
        if eqn.primitive.name in (*MOVES, "slice") or is_same(eqn):
            atom = eqn.invars[0]
        elif masked:
            atom = masked[0]
        else:
            break
    return atom
