"""Evaluation of jaxprs without compiling them as a whole."""

from __future__ import annotations

from typing import Any

_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def evaluated(jaxpr: Any, *arguments: Any) -> list[Any]:
    """The results of a closed jaxpr, computed one equation after the other.

    Each primitive is compiled once for a shape, in place of every program.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip(body.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(body.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in body.eqns:
        operands = [read(x) for x in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in _CALLS:
            results = evaluated(inner, *operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if isinstance(results, list | tuple) else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in body.outvars]
