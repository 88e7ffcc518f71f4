"""Workload of max pooling for the tuner."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.max_pool.primitive import gradient_p, max_pool_p
from tracea_jax.policy import Choice
from tracea_jax.problem import MaxPoolProblem


def check(problem: MaxPoolProblem) -> None:
    """Raises ValueError on what cannot be run."""
    check_dtype(problem.dtype)


def operands(problem: MaxPoolProblem, seed: int) -> list[jax.Array]:
    """Standard normal arrays, in the order of the primitive."""
    p = problem
    x = (p.batch, p.height, p.width, p.channels), p.dtype
    dy = (p.batch, *p.out_size, p.channels), p.dtype
    return random_normal([x] if p.direction == "forward" else [x, dy], seed)


def execute(
    *inputs: jax.Array, problem: MaxPoolProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    primitive = max_pool_p if problem.direction == "forward" else gradient_p
    return primitive.bind(*inputs, **windows(problem), **forced(choice))


def windows(problem: MaxPoolProblem) -> dict[str, Any]:
    """The primitive's parameters that say what the windows are."""
    return {n: getattr(problem, n) for n in ("kernel", "strides", "padding")}


def ragged(problem: MaxPoolProblem) -> MaxPoolProblem:
    """A small problem of the same kind, of sizes that no stride divides."""
    return dataclasses.replace(problem, batch=2, height=13, width=11, channels=24)


def judge(
    problem: MaxPoolProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """See ``Workload``: the distance from sums in float64; maxima have to be equal."""
    wanted, sizes = exact(problem, *inputs)
    unit = unit_roundoff(problem.dtype)

    def error(results: list[jax.Array]) -> float:
        found = np.asarray(results[0].astype(jnp.float32), np.float64)
        worst = float((np.abs(found - wanted) / (2 * unit * sizes)).max())
        return worst if np.isfinite(worst) else float("inf")

    return error


def exact(
    problem: MaxPoolProblem, x: jax.Array, dy: jax.Array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the sum of magnitudes of what was added for each."""
    p = problem
    pads = ((0, 0), *p.padding, (0, 0))
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    wide = np.pad(wide, pads, constant_values=-np.inf)
    (down, across), (stride_h, stride_w) = p.out_size, p.strides
    taps = [(a, b) for a in range(p.kernel[0]) for b in range(p.kernel[1])]
    places = [
        (
            slice(None),
            slice(a, a + stride_h * (down - 1) + 1, stride_h),
            slice(b, b + stride_w * (across - 1) + 1, stride_w),
        )
        for a, b in taps
    ]
    entries = np.stack([wide[place] for place in places])
    if dy is None:
        return entries.max(0), np.abs(entries.max(0)) + np.finfo(np.float32).tiny
    first = entries.argmax(0)
    value, size = (np.zeros_like(wide) for _ in range(2))
    given = np.asarray(dy.astype(jnp.float32), np.float64)
    for tap, place in enumerate(places):
        value[place] += np.where(first == tap, given, 0)
        size[place] += np.where(first == tap, np.abs(given), 0)
    ends = zip(pads, wide.shape, strict=True)
    inside = tuple(slice(low, n - high) for (low, high), n in ends)
    return value[inside], size[inside] + np.finfo(np.float32).tiny


WORKLOAD = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
