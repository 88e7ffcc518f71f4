"""Workload of a user's kernel, which is verified against its reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import Judge, Workload, forced, unit_roundoff
from tracea_jax.ops.common.typed import jit
from tracea_jax.ops.cuda_kernel.frozen import Fixed
from tracea_jax.ops.cuda_kernel.primitive import bind
from tracea_jax.policy import Choice
from tracea_jax.problem.cuda_kernel import CudaKernelProblem

_ROUNDOFFS = 64  # that a result may be off, unless the user gives a tolerance
_MOST_INTEGER = 127  # of random operands: a kernel may index with them


def _check(problem: CudaKernelProblem) -> None:
    if problem.launcher is None:
        raise ValueError(
            f"no tracea.cuda_kernel of this process is {problem.kernel!r}; tune a "
            "function that calls it"
        )
    if not problem.launcher.has_reference:
        raise ValueError(
            f"cuda_kernel {problem.kernel!r} cannot be tuned without reference=, which "
            "its results are compared with"
        )
    if not problem.inputs:
        raise ValueError(
            f"cuda_kernel {problem.kernel!r} has no operands to be tuned on"
        )


def _operands(problem: CudaKernelProblem, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), max(1, len(problem.inputs)))
    pairs = zip(keys, problem.inputs, strict=False)
    return [_random(key, *array) for key, array in pairs]


def _random(key: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.bool_):
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(kind, jnp.integer):
        return jax.random.randint(key, shape, 0, _MOST_INTEGER).astype(kind)
    if jnp.issubdtype(kind, jnp.complexfloating):
        return jax.random.normal(key, shape, kind)
    return jax.random.normal(key, shape, jnp.float32).astype(kind)


def _execute(
    *inputs: jax.Array, problem: CudaKernelProblem, choice: Choice
) -> list[jax.Array]:
    return bind(
        *inputs,
        kernel=Fixed(problem.launcher),
        numbers=problem.scalars,
        **forced(choice),
    )


def _ragged(problem: CudaKernelProblem) -> CudaKernelProblem:
    """The same: whether a kernel takes other shapes, only the user knows."""
    return problem


def _judge(
    problem: CudaKernelProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    with jax.default_matmul_precision("highest"):
        expected = [np.asarray(x) for x in jit(problem.launcher.reference)(*inputs)]
    given = problem.launcher.tolerance

    def error(results: list[jax.Array]) -> float:
        pairs = zip(results, expected, strict=True)
        return max(_error(np.asarray(x), y, given) for x, y in pairs)

    return error


def _error(found: np.ndarray, expected: np.ndarray, tolerance: float | None) -> float:
    """The largest error in units of the tolerance; infinite where one is no number."""
    if not expected.size:
        return 0.0
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0 if (found == expected).all() else float("inf")
    limit = tolerance or _ROUNDOFFS * unit_roundoff(expected.dtype.name)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    x, y = found.astype(wide), expected.astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore", divide="ignore"):
        finite = np.abs(y[np.isfinite(y)])
        scale = np.abs(y) + np.sqrt(np.square(finite).sum() / max(1, finite.size))
        errors = np.where(same, 0.0, np.abs(x - y) / (limit * scale))
    worst = float(errors.max())
    return worst if np.isfinite(worst) else float("inf")


WORKLOAD = Workload(
    check=_check, operands=_operands, execute=_execute, ragged=_ragged, judge=_judge
)
