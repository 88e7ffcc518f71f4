"""Equations left in a program for reasons that rules do not see.

Rules say why they left an equation that they looked at. Here are the other misses:
those noted in functions that were spliced before they were differentiated, bodies of
functions with derivatives of their own, and what was differentiated too early.
``explain`` lists them; ``transform`` warns of the last where this JAX lets nobody be
earlier.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from tracea_jax import _compat
from tracea_jax.ops.common.programs import jaxprs_in
from tracea_jax.rewrite.match import Miss, Rule, described
from tracea_jax.rewrite.spliced import Spliced
from tracea_jax.rewrite.view import Equation

CUSTOM_VJP = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
KERNELS = frozenset({"pallas_call"})  # their bodies are written for one device

OWN_DERIVATIVE = "bodies of custom_vjp functions are left as they are"
TOO_EARLY = "differentiated before transform saw it; apply it to the loss"


def left(jaxpr: Any, rules: Iterable[Rule], *, after_grad: bool = False) -> list[Miss]:
    """The misses of a program that splicing it does not tell.

    Args:
      jaxpr: as traced, not spliced yet; open or closed.
      rules: what it is spliced by; without rules nothing is missed.
      after_grad: whether it was meant to be spliced after it was differentiated.
    """
    misses = [*_noted(jaxpr), *unseen(jaxpr, rules)]
    return [m for m in misses if not (after_grad and m.reason == TOO_EARLY)]


def unseen(jaxpr: Any, rules: Iterable[Rule]) -> Iterator[Miss]:
    """Those misses without the ones noted in functions that were spliced before."""
    ops = _expected(rules)
    for place in _places(jaxpr, _Around()):
        op = ops.get(place.eqn.primitive.name)
        if op is None or any(isinstance(note, Spliced) for note in place.notes):
            continue
        if place.around.own_derivative:
            yield _miss(place, op, OWN_DERIVATIVE)
        elif place.is_too_early:
            yield _miss(place, "layer", TOO_EARLY)


def _expected(rules: Iterable[Rule]) -> dict[str, str]:
    """Names of primitives -> the op that one would expect there."""
    return {
        anchor: rule.op for rule in rules if rule.is_expected for anchor in rule.anchors
    }


def _noted(jaxpr: Any) -> Iterator[Miss]:
    functions: set[Spliced] = set()
    for place in _places(jaxpr, _Around()):
        for scope, note in _compat.notes(place.name_stack):
            if isinstance(note, Spliced) and note not in functions:
                functions.add(note)
                yield from (_within(scope, place.around, m) for m in note.misses)


def warn_of_early_derivatives(jaxpr: Any, rules: Iterable[Rule], why: str) -> None:
    """Warns, once, if a program has derivatives that could not be spliced before.

    Args:
      jaxpr, rules: as for ``left``.
      why: what this JAX lacks.
    """
    anchors = _expected(rules)
    for place in _places(jaxpr, _Around()):
        if place.eqn.primitive.name in anchors and place.is_too_early:
            _warn(why)
            return


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(
        "a transformed function differentiates inside, and tracea_jax cannot replace "
        f"anything before this JAX does so ({why}): only single products and "
        "convolutions are replaced; apply transform to the loss instead",
        stacklevel=2,
    )


# --- walking --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The context of the equations of a jaxpr.

    Attributes:
      scope: of the jaxpr.
      own_derivative: whether it belongs to a custom_vjp function.
      differentiated: whether it is part of a derivative.
      notes: what equations around it are marked with, see ``_compat.Mark``.
    """

    scope: str = ""
    own_derivative: bool = False
    differentiated: bool = False
    notes: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An equation, and what is around it."""

    eqn: Equation
    around: _Around

    @property
    def name_stack(self) -> Any:
        return self.eqn.source_info.name_stack

    @property
    def notes(self) -> tuple[Any, ...]:
        own = (note for _, note in _compat.notes(self.name_stack))
        return (*self.around.notes, *own)

    @property
    def is_differentiated(self) -> bool:
        # "transpose(jvp(scope))" in the backward pass
        return self.around.differentiated or "jvp(" in str(self.name_stack)

    @property
    def is_too_early(self) -> bool:
        return self.is_differentiated and not self.notes

    def inside(self) -> _Around:
        """The context of the jaxprs that the equation holds."""
        around, name = self.around, self.eqn.primitive.name
        return _Around(
            scope=_joined(around.scope, self.name_stack),
            own_derivative=around.own_derivative or name in CUSTOM_VJP,
            differentiated=self.is_differentiated,
            notes=self.notes,
        )


def _places(jaxpr: Any, around: _Around) -> Iterator[_Place]:
    for eqn in jaxpr.eqns:
        place = _Place(eqn=eqn, around=around)
        yield place
        if eqn.primitive.name not in KERNELS:
            for inner in jaxprs_in(list(eqn.params.values())):
                yield from _places(inner, place.inside())


def _miss(place: _Place, op: str, reason: str) -> Miss:
    return Miss(
        op=op,
        scope=_joined(place.around.scope, place.name_stack),
        what=described(place.eqn),
        reason=reason,
    )


def _within(scope: Any, around: _Around, miss: Miss) -> Miss:
    """A miss in a function, as seen from where the function was differentiated."""
    full = scope.extend(miss.scope) if miss.scope else scope
    return dataclasses.replace(miss, scope=_joined(around.scope, full))


def _joined(*scopes: Any) -> str:
    return "/".join(text for scope in scopes if (text := str(scope)))
