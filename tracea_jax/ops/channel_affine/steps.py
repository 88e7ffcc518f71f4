"""Scales and shifts in a row, each operation as a program has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.nn import relu

STEPS = ("add", "sub", "rsub", "mul", "div")
SCALES = ("mul", "div")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The values computed from x and the steps' operands.

    Attributes:
      steps: names of ``STEPS``, in a row; "rsub" is c - y. No shift is between two
        scales.
      dtype: that the last step's result is rounded to; None for x's.
      residual: whether an array is added to that, before a relu.
      activation: what that goes through: "none" or "relu".
      copies: of the result, one for each of its uses. Their cotangents come one by one,
        so that whoever sums them is known: the gradient's kernel, of a residual.
    """

    steps: tuple[str, ...]
    dtype: str | None = None
    residual: bool = False
    activation: str = "none"
    copies: int = 1

    def __post_init__(self) -> None:
        assert self.activation == "relu" or not self.residual, self

    @property
    def operands(self) -> int:
        """Number of the primitive's operands: x, its source, the steps', a residual."""
        return 2 + len(self.steps) + self.residual


def reference(x: Any, source: Any, *others: Any, result: Result) -> list[Any]:
    """The primitive in jnp; the source is x."""
    y = rounded(row(x, others[: len(result.steps)], result.steps), result)
    if result.residual:
        y = y + others[-1]
    return [relu(y) if result.activation == "relu" else y] * result.copies


def row(x: Any, operands: Sequence[Any], steps: Sequence[str]) -> Any:
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
