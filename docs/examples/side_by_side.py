"""Runs a function as plain JAX and transformed, in turns, and compares the two.

Each example compiles its step twice. A machine that is busy, or becomes warm, slows
both sides down alike when they take turns, so the ratio of their times can be trusted
where the times themselves cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of the comparison; ``print`` it.

    Attributes:
      name: of the results, such as "loss".
      plain, fast: the results of every call.
      plain_ms, fast_ms: medians of the times of a call, without the first.
      ratio: plain time over transformed time, the median over the calls.
      tolerance: how much results may differ, relative to the largest.
    """

    name: str
    plain: np.ndarray
    fast: np.ndarray
    plain_ms: float
    fast_ms: float
    ratio: float
    tolerance: float

    @property
    def difference(self) -> float:
        return float(np.abs(self.fast - self.plain).max() / np.abs(self.plain).max())

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DO NOT AGREE"
        return "\n".join(
            [
                f"plain       {self.plain_ms:8.2f} ms{self._course(self.plain)}",
                f"transformed {self.fast_ms:8.2f} ms{self._course(self.fast)}",
                f"{self.ratio:.2f} times as fast; results {verdict}: they differ by "
                f"{self.difference:.1e}, {self.tolerance:.0e} is allowed",
            ]
        )

    def _course(self, results: np.ndarray) -> str:
        if results.ndim > 1:  # not one number a call
            return ""
        return f", {self.name} {results[0]:.3f} -> {results[-1]:.3f}"


def compare(
    plain: Callable[..., Any],
    fast: Callable[..., Any],
    inputs: Iterable[tuple[Any, ...]],
    *,
    name: str = "loss",
    tolerance: float = 1e-2,
) -> Comparison:
    """Calls both with each of the inputs, in turns, and compares what they return.

    The first call of each compiles, and its time does not count.
    """
    sides = {"plain": plain, "fast": fast}
    times: dict[str, list[float]] = {side: [] for side in sides}
    results: dict[str, list[np.ndarray]] = {side: [] for side in sides}
    for i, arguments in enumerate(inputs):
        # Who goes second finds warm caches: the sides change places.
        for side in sorted(sides, reverse=bool(i % 2)):
            start = time.perf_counter()
            result = jax.block_until_ready(sides[side](*arguments))
            times[side].append(time.perf_counter() - start)
            results[side].append(np.asarray(result, np.float64))
    plain_s, fast_s = times["plain"][1:], times["fast"][1:]
    return Comparison(
        name=name,
        plain=np.stack(results["plain"]),
        fast=np.stack(results["fast"]),
        plain_ms=1e3 * statistics.median(plain_s),
        fast_ms=1e3 * statistics.median(fast_s),
        ratio=statistics.median(p / f for p, f in zip(plain_s, fast_s, strict=True)),
        tolerance=tolerance,
    )


@dataclasses.dataclass(kw_only=True)
class Carrying:
    """A function of the inputs alone: the state goes from each call to the next.

    Attributes:
      step: (state, *inputs) -> (state, result); it may donate the state.
      state: the next one. The first is copied: the other side starts with it too.
      result: of the last call.
    """

    step: Callable[..., Any]
    state: Any
    result: Any = None

    def __post_init__(self) -> None:
        self.state = jax.tree.map(jnp.copy, self.state)

    def __call__(self, *inputs: Any) -> Any:
        self.state, self.result = self.step(self.state, *inputs)
        return self.result


def arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of an example: ``--name`` for each default."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name, value in defaults.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value
        )
    return parser.parse_args()
