"""Scales and shifts in a row, each operation as a program has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.nn import relu

STEPS = ("add", "sub", "rsub", "mul", "div")
SCALES = ("mul", "div")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is made of x and the steps' operands.

    Attributes:
      steps: names of ``STEPS``, in a row; "rsub" is c - y. No shift is between two
        scales.
      dtype: that the last step's result is rounded to; None for x's.
      activation: what that goes through: "none" or "relu".
    """

    steps: tuple[str, ...]
    dtype: str | None = None
    activation: str = "none"


def reference(x: Any, source: Any, *operands: Any, result: Result) -> list[Any]:
    """The primitive in jnp; the source is x."""
    y = rounded(row(x, operands, result.steps), result)
    return [relu(y) if result.activation == "relu" else y]


def row(x: Any, operands: Any, steps: tuple[str, ...]) -> Any:
    """The last step's result."""
    for name, c in zip(steps, operands, strict=True):
        x = _step(name, x, c)
    return x


def rounded(y: Any, result: Result) -> Any:
    """The last step's result in the result's dtype."""
    return y if result.dtype is None else y.astype(result.dtype)


def _step(name: str, y: Any, c: Any) -> Any:
    match name:
        case "add":
            return y + c
        case "sub":
            return y - c
        case "rsub":
            return c - y
        case "mul":
            return y * c
        case _:
            return y / c
