"""Workload of elementwise functions for the tuner."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    unit_roundoff,
)
from tracea_jax.ops.common.typed import asarray, finfo
from tracea_jax.ops.elementwise.primitive import elementwise_p
from tracea_jax.policy import Choice
from tracea_jax.problem import ElementwiseProblem

_ROUNDINGS = 8  # of a complex quotient, and one for the result


def check(problem: ElementwiseProblem) -> None:
    """Raises ValueError on what cannot be run."""
    check_dtype(problem.dtype)


def operands(problem: ElementwiseProblem, seed: int) -> list[jax.Array]:
    """Standard normal operands."""
    rng = np.random.default_rng(seed)
    sides = ("left", "right")[: problem.row.operands]
    return [_normal(problem, () if problem.scalar == s else None, rng) for s in sides]


def _normal(
    problem: ElementwiseProblem, shape: tuple[int, ...] | None, rng: np.random.Generator
) -> jax.Array:
    shape = (problem.size,) if shape is None else shape
    values = rng.standard_normal(shape)
    if problem.is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return asarray(values).astype(problem.dtype)


def execute(
    *inputs: jax.Array, problem: ElementwiseProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    return elementwise_p.bind(*inputs, function=problem.function, **forced(choice))


def ragged(problem: ElementwiseProblem) -> ElementwiseProblem:
    """A small problem of the same kind, of a prime number of elements."""
    return dataclasses.replace(problem, size=1009)


def judge(
    problem: ElementwiseProblem,
    device: Device,
    inputs: list[jax.Array],
    seed: int,
) -> Judge:
    """See ``Workload``: the distance from numpy's result in double precision."""
    wide = "complex128" if problem.is_complex else "float64"
    exact = [np.asarray(x.astype(_storable(x))).astype(wide) for x in inputs]
    with np.errstate(all="ignore"):
        wanted = getattr(np, problem.function)(*exact)
    parts = [np.abs(x) for x in (*exact, wanted)]
    if problem.function in ("multiply", "divide"):
        parts = parts[-1:]
    unit = unit_roundoff(finfo(problem.dtype).dtype.name)
    bound = sum(parts) * _ROUNDINGS * unit

    def error(results: list[jax.Array]) -> float:
        found = np.asarray(results[0].astype(_storable(results[0]))).astype(
            wanted.dtype
        )
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            worst = float((np.abs(found - wanted) / bound).max())
        return worst if np.isfinite(worst) else float("inf")

    return error


def _storable(x: jax.Array) -> jnp.dtype:
    """The dtype, or float32 for those that numpy has not."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


ELEMENTWISE = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
