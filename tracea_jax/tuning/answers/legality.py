"""Which recorded configs may run today, and which would compile what they compiled.

Whoever reads records asks: answers, neighbours, searches, ``store.upkeep``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.schema import check_types
from tracea_jax.tuning.store.code import code_of
from tracea_jax.tuning.store.records import Best, Observation
from tracea_jax.variants.base import Varying

# What a config of wrong types raises, whatever meets it.
_ILLEGAL = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError)


def legal_choice(
    variant: str, config: dict[str, Any], problem: Problem, device: Device
) -> Choice | str:
    """The choice of a recorded config, or why it cannot run, as a phrase."""
    try:
        reason = variants.get(problem.op, variant).why_not(problem, device)
    except _ILLEGAL as e:  # a variant of another version
        return f"is not legal: {e}"
    if reason is not None:
        return f"cannot run: {reason}"
    return read_choice(variant, config, problem, device)


def read_choice(
    variant: str, config: Any, problem: Problem, device: Device
) -> Choice | str:
    """The same for a variant that is known to serve the problem."""
    try:
        found = variants.get(problem.op, variant)
        plain = hashable(config) if isinstance(config, dict) else config
        value = variants.config_from_json(found, plain)
        found.check(problem, value, device)
        check_types(value)
    except _ILLEGAL as e:
        return f"is not legal: {e}"
    return Choice(variant=variant, config=value)


def hashable(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where configs have tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}


def varies(
    variant: str, config: dict[str, Any], problem: Problem, device: Device
) -> bool:
    """True if bits of a recorded choice may differ from run to run, if it is legal."""
    found = next((v for v in variants.of(problem.op) if v.name == variant), None)
    if not isinstance(found, Varying):
        return False
    legal = legal_choice(variant, config, problem, device)
    return (
        isinstance(legal, Choice)
        and found.may_vary(problem, legal.config, device) is not None
    )


def is_current(
    variant: Any, config: Any, code: Any, problem: Problem, device: Device
) -> bool:
    """Returns whether a recorded config would compile the same kernels today.

    Args:
      variant, config, code: as a record or a plain runner-up has them.
      problem, device: what it was measured for.
    """
    if not isinstance(variant, str) or not isinstance(config, dict):
        return False
    choice = legal_choice(variant, config, problem, device)
    return isinstance(choice, Choice) and code_of(problem, choice, device) == code


def current(
    observations: Iterable[Observation], problem: Problem, device: Device
) -> tuple[Observation, ...]:
    """The observations whose kernels are the same today."""
    return tuple(
        o
        for o in observations
        if is_current(o.variant, o.config, o.code, problem, device)
    )


def current_best(best: Best, problem: Problem, device: Device) -> Best | None:
    """An answer whose kernels are the same today, its runner-up only if they are."""
    if not is_current(best.variant, best.config, best.code, problem, device):
        return None
    second = best.runner_up
    fields = (second.get("variant"), second.get("config"), second.get("code", ""))
    if second and not is_current(*fields, problem, device):
        return dataclasses.replace(best, runner_up={})
    return best
