"""Values derived from the product of queries and keys, such as a maximum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.dims import MOVES
from tracea_jax.rewrite.view import Atom, Equation, View

_KEEPS = MOVES | {"convert_element_type", "copy", "pvary", "stop_gradient"}


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """Values that depend on the product.

    Attributes:
      view: the equations.
      values: those values.
      inner: the scores after each equation on their way to the softmax.
    """

    view: View
    values: set[Any]
    inner: set[Any]

    def __contains__(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in self.values

    def slice(self, atom: Atom) -> frozenset[int]:
        """Equations between the scores and a function of them."""
        found: set[int] = set()
        pending = [atom]
        while pending:
            x = pending.pop()
            if x not in self or x in self.inner:
                continue
            index = self.view.producer_index(x)
            if index is None or index in found:
                continue
            found.add(index)
            pending += self.view.eqns[index].invars
        return frozenset(found)

    def is_maximum(self, atom: Atom, *, negated: bool = False) -> bool:
        """Returns whether a value is the largest score, up to bounds and fills.

        Softmax of scores less that value is NaN only where softmax of the scores is. A
        mean, say, may be infinite because a few scores are, or because it overflows.

        Args:
          atom: the value.
          negated: whether its negative is the largest score.
        """
        is_reduced = False
        while atom not in self.inner:
            eqn = self.view.producer(atom)
            if eqn is None or atom not in self:
                return False
            name, source = eqn.primitive.name, eqn.invars[0]
            if name == "reduce_max":
                is_reduced = True
            elif name == "neg":
                if is_reduced:
                    return False
                negated = not negated
            elif name in ("max", "select_n"):
                source = self._bounded(eqn, fills=is_reduced)
            elif name not in _KEEPS:
                return False
            if source is None:
                return False
            atom = source
        return is_reduced and not negated

    def _bounded(self, eqn: Equation, *, fills: bool) -> Atom | None:
        """The score, or the maximum, for which an equation may have something else."""
        cases = eqn.invars if eqn.primitive.name == "max" else eqn.invars[1:]
        found = [x for x in cases if x in self]
        if len(found) != 1 or len(cases) != 2:
            return None
        if eqn.primitive.name == "max":
            return found[0]
        other = self.view.scalar(cases[0] if found[0] is cases[1] else cases[1])
        if other is None or not other < math.inf:
            return None
        return found[0] if fills or math.isfinite(other) else None


def derived_along(view: View, path: Sequence[int], end: int) -> Derived:
    """Values derived from the product that a path begins with.

    Args:
      view: the equations.
      path: indices of those from the product to the softmax.
      end: index of the last equation that is looked at.
    """
    (var,) = view.eqns[path[0]].outvars
    found, pending = {var}, [var]
    while pending:
        for index in view.consumers(pending.pop()):
            if 0 <= index <= end:
                new = set(view.eqns[index].outvars) - found
                found |= new
                pending += new
    return Derived(view, found, {view.eqns[i].outvars[0] for i in path})
