"""The equations that a function traces to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(f: Callable[..., Any], *args: Any, name: str) -> list[Any]:
    """All equations of a primitive, by its name, those in nested jaxprs included."""
    found = all_equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [e for e in found if e.primitive.name == name]


def count(f: Callable[..., Any], *args: Any, name: str = "tracea_matmul") -> int:
    """How many of f's equations are of this primitive."""
    return len(equations(f, *args, name=name))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, those in nested jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from all_equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
