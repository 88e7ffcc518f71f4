"""Reading jaxprs: those nested in equations, and the calls of our ops in them.

Read by ``choice`` and by ``rewrite`` and ``explain``. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from tracea_jax import catalogue
from tracea_jax.catalogue import Planned


def jaxprs_in(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation; some are tuples of them."""
    if isinstance(value, tuple | list):
        for item in cast("Sequence[Any]", value):
            yield from jaxprs_in(item)
    elif hasattr(value, "eqns"):
        yield value


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, each before those of the jaxprs that it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in(list(eqn.params.values())):
            yield from equations_in(inner)


# The record of a call's primitive, its abstract operands and its parameters.
Call = tuple[Planned, list[Any], dict[str, Any]]


def calls_in(jaxpr: Any) -> Iterator[Call]:
    """The calls of our ops in a jaxpr, those in nested jaxprs included."""
    planned = catalogue.planned()
    for eqn in equations_in(jaxpr):
        if eqn.primitive in planned:
            yield planned[eqn.primitive], [x.aval for x in eqn.invars], eqn.params


def is_composite(jaxpr: Any) -> bool:
    """True if an op is called that is made of others (see ``catalogue.Composite``)."""
    composites = {c.primitive for c in catalogue.composites()}
    return any(eqn.primitive in composites for eqn in equations_in(jaxpr))
