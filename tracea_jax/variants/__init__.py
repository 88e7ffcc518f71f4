"""Variants: the ways to compute each op, as the op's record lists them.

Here they are looked up; what one is, ``variants.base`` says. The modules beside this
one hold them, and the records in ``ops/<op>/op.py`` put them in order: our kernels
first, XLA last.
"""

from __future__ import annotations

from typing import Any

from tracea_jax import catalogue
from tracea_jax.mistakes import shown, similar
from tracea_jax.problem import Problem
from tracea_jax.variants.base import (
    XLA,
    Call,
    Composed,
    Config,
    CpuCall,
    Inline,
    Variant,
    config_from_json,
    described,
    is_legal,
    kernels_in,
    may_vary,
)
from tracea_jax.variants.space import Space
from tracea_jax.variants.steps import Buffer, Expression, Launch, Step, Steps


def parts(problem: Problem) -> tuple[Problem, ...]:
    """Problems of other ops that variants of this one plan on their own."""
    composed = (v for v in of(problem.op) if isinstance(v, Composed))
    return tuple(dict.fromkeys(part for v in composed for part in v.parts(problem)))


def of(op: str) -> tuple[Variant, ...]:
    """All variants of an op."""
    return catalogue.get(op).variants


def get(op: str, name: str) -> Variant:
    """The variant of this name.

    Raises:
      ValueError: naming the variants the op has.
    """
    for variant in of(op):
        if variant.name == name:
            return variant
    names = ", ".join(v.name for v in of(op))
    raise ValueError(f"{op} has no variant {name!r}; it has {names}")


def check_implementation(op: str, implementation: Any) -> None:
    """Raises ValueError unless ``implementation`` is a value that the op accepts."""
    valid = ("tracea", *(v.name for v in of(op)))
    is_name = implementation is None or isinstance(implementation, str)
    if not is_name or implementation not in (None, *valid):
        raise ValueError(
            f"implementation={shown(implementation)} is unknown; it must be None or "
            f"one of {', '.join(valid)}{similar(implementation, valid)}"
        )


__all__ = [
    "XLA",
    "Buffer",
    "Call",
    "Composed",
    "Config",
    "CpuCall",
    "Expression",
    "Inline",
    "Launch",
    "Space",
    "Step",
    "Steps",
    "Variant",
    "check_implementation",
    "config_from_json",
    "described",
    "get",
    "is_legal",
    "kernels_in",
    "may_vary",
    "of",
    "parts",
]
