"""Products within a site, as choices of their own, of which devices plan parts.

Where XLA serves a site, the user's equations are compiled. If the program is
partitioned over several devices, a device's part of a product in them may deserve a
kernel, and the op's sharding rule may send fewer bytes than XLA's partitioner: the
gradients of weights that are split over the devices of the batch become one
reduce-scatter each. So each ``dot_general`` in the site of a product with an epilogue
becomes a choice between itself and the op. A site that is one product is one already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from tracea_jax._compat import ClosedJaxpr
from tracea_jax.faults import reported
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.matmul import MATMUL
from tracea_jax.rewrite.view import Equation, View

# (match, its equation) -> the choice
MakeChoice = Callable[[Match, Equation], Equation]

OPS = frozenset({"matmul", "gated_matmul"})  # whose sites are products and an epilogue
_CALLS = frozenset({"jit", "pjit"})  # as of jnp.einsum


def in_parts(eqns: Sequence[Equation], make: MakeChoice) -> list[Equation]:
    """The equations with each product as a choice, those in calls included."""
    return [_replaced(eqn, make) for eqn in eqns]


def _replaced(eqn: Equation, make: MakeChoice) -> Equation:
    if eqn.primitive.name in MATMUL.anchors:
        return _as_choice(eqn, make)
    if eqn.primitive.name not in _CALLS:
        return eqn
    inner = eqn.params["jaxpr"]
    new = _inside(inner, make)
    if new is inner:
        return eqn
    return eqn.replace(params={**eqn.params, "jaxpr": new})


def _inside(jaxpr: Any, make: MakeChoice) -> Any:
    if ClosedJaxpr is not Jaxpr and isinstance(jaxpr, ClosedJaxpr):  # before jax 0.11
        inner = _inside(jaxpr.jaxpr, make)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns = in_parts(jaxpr.eqns, make)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _as_choice(eqn: Equation, make: MakeChoice) -> Equation:
    """The choice between a product and its op; the equation if it is no site."""
    try:
        found = MATMUL.match(View([eqn], eqn.outvars), 0)
        return make(found, eqn) if isinstance(found, Match) else eqn
    except Exception as e:
        reported(MATMUL.op, e)
        return eqn
