"""Making small calls part of the equations around them, so that rules see through.

``jnp.where``, ``jnp.tril`` and ``jax.nn.silu`` are functions under ``jit``: each traces
to one equation that hides a few elementwise ones. Calls that no rule has looked into in
the end are calls again: XLA may round the equations of ``jnp.clip(x * a + b, 1, 2)``
otherwise than those of the call, whose bounds are constants only outside of it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, and the equations in its place."""

    eqn: Equation
    inside: tuple[Equation, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inlined:
    """Equations, and the calls that some of them stand for.

    Attributes:
      eqns: those of small calls in place of the calls.
      calls: each before the calls in it.
    """

    eqns: list[Equation]
    calls: tuple[Call, ...]

    def with_calls(
        self, eqns: Sequence[Equation], results: Iterable[Any]
    ) -> list[Equation]:
        """Other equations, with the calls all of whose equations are among them.

        Args:
          eqns: some of these, and others.
          results: of all of them.
        """
        places = {id(eqn): i for i, eqn in enumerate(eqns)}
        users = collections.defaultdict[Any, list[int]](list)
        for i, eqn in enumerate(eqns):
            for x in eqn.invars:
                if not isinstance(x, Literal):
                    users[x].append(i)
        for x in results:
            if not isinstance(x, Literal):
                users[x].append(len(eqns))
        new: list[Equation | None] = list(eqns)
        for call in self.calls:
            first = places.get(id(call.inside[0]))
            if first is None or new[first] is not call.inside[0]:
                continue
            own = range(first, first + len(call.inside))
            if [places.get(id(eqn)) for eqn in call.inside] != list(own):
                continue
            made = {x for eqn in call.inside for x in eqn.outvars}
            hidden = made.difference(call.eqn.outvars)
            if all(i in own for x in hidden for i in users[x]):
                new[first : own.stop] = [call.eqn, *[None] * (len(own) - 1)]
        return [eqn for eqn in new if eqn is not None]


def inlined(eqns: Iterable[Equation]) -> Inlined:
    """The equations with those of small calls in place of the calls."""
    calls: list[Call] = []
    return Inlined(eqns=_flat(eqns, calls), calls=tuple(calls))


def _flat(eqns: Iterable[Equation], calls: list[Call]) -> list[Equation]:
    return [inner for eqn in eqns for inner in _inlined(eqn, calls)]


def _inlined(eqn: Equation, calls: list[Call]) -> list[Equation]:
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
    inside: list[Call] = []
    flat = _flat(inner, inside)
    if flat:
        calls.append(Call(eqn=eqn, inside=tuple(flat)))
    calls += inside
    return flat


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
