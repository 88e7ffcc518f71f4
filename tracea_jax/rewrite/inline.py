"""Making small calls part of the equations around them, so that rules see through.

``jnp.where``, ``jnp.tril`` and ``jax.nn.silu`` are functions under ``jit``: each traces
to one equation that hides a few elementwise ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.view import Equation

MAX_EQUATIONS = 24

# Cheap, without effects, and what rules read.
_SMALL = frozenset(
    """abs add and broadcast_in_dim concatenate convert_element_type copy div
    custom_jvp_call eq erf erfc exp exp2 expand_dims expm1 gather ge gt integer_pow iota
    is_finite le log log1p logistic lt max min mul ne neg not or pad pow pvary
    reduce_max
    reduce_sum reshape round rsqrt select_n sign slice split sqrt square squeeze
    stop_gradient sub tanh transpose xor""".split()
)


def inline_small_calls(eqns: Iterable[Equation]) -> list[Equation]:
    """The equations with those of small calls in place of the calls."""
    return [inner for eqn in eqns for inner in _inlined(eqn)]


def _inlined(eqn: Equation) -> list[Equation]:
    body = _body(eqn)
    if body is None:
        return [eqn]
    names: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))
    # A result that is an input, or a literal, has no equation to carry its name.
    results = [x for x in body.outvars if not isinstance(x, Literal)]
    if len(set(results)) < len(body.outvars) or any(x in names for x in results):
        return [eqn]
    names.update(zip(results, eqn.outvars, strict=True))
    inner = []
    for e in body.eqns:
        for var in e.outvars:
            names.setdefault(var, type(var)(var.aval))
        inner.append(
            e.replace(
                invars=[x if isinstance(x, Literal) else names[x] for x in e.invars],
                outvars=[names[x] for x in e.outvars],
                source_info=eqn.source_info,
            )
        )
    return inline_small_calls(inner)


def _body(eqn: Equation) -> Any | None:
    """The open jaxpr of a call that may be inlined, else None."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    closed = eqn.params["jaxpr"]
    if closed.consts or eqn.effects or any(eqn.params.get("donated_invars", ())):
        return None
    kinds = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    if any(not _unspecified(x) for kind in kinds for x in eqn.params.get(kind, ())):
        return None
    body = getattr(closed, "jaxpr", closed)
    return body if _is_small(body) else None


def _is_small(body: Any) -> bool:
    return len(body.eqns) <= MAX_EQUATIONS and all(
        e.primitive.name in _SMALL or _body(e) is not None for e in body.eqns
    )


def _unspecified(sharding: Any) -> bool:
    return sharding is None or type(sharding).__name__ == "UnspecifiedValue"
