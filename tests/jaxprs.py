"""The equations that a function traces to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(f: Callable[..., Any], *args: Any, name: str) -> list[Any]:
    """All equations of a primitive, by its name, those in nested jaxprs included."""
    found = _all(jax.make_jaxpr(f)(*args).jaxpr)
    return [e for e in found if e.primitive.name == name]


def count(f: Callable[..., Any], *args: Any, name: str = "tracea_matmul") -> int:
    """How many of f's equations are of this primitive."""
    return len(equations(f, *args, name=name))


def _all(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _all(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
