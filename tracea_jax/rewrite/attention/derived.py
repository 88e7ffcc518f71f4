"""What depends on the product of queries and keys, as a maximum of the scores does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.view import Atom, View


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


def derived_along(view: View, path: Sequence[int], end: int) -> Derived:
    """What depends on the product that a path begins with.

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
