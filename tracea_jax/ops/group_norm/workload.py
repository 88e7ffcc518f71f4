"""Workload of group norms for the tuner."""

from __future__ import annotations

import dataclasses

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
from tracea_jax.ops.common.exact import ACTIVATIONS_F64, DERIVATIVES_F64
from tracea_jax.ops.common.typed import Params, asarray
from tracea_jax.ops.group_norm.primitive import gradients_p, group_norm_p
from tracea_jax.policy import Choice
from tracea_jax.problem import GroupNormProblem

_ROUNDINGS = 2  # to the dtype of a result: its own, and what approximations leave
_SUMS = 64  # roundings to float32 that a sum of many terms may be off by


def check(problem: GroupNormProblem) -> None:
    """Raises ValueError on what cannot be run."""
    check_dtype(problem.dtype)
    check_dtype(problem.parameters)


def operands(problem: GroupNormProblem, seed: int) -> list[jax.Array]:
    """Normal operands; means are as large as deviations, and scales near one."""
    p = problem
    of_x, of_channel = (p.images, p.pixels, p.channels), (p.channels,)
    shapes = [(of_x, "float32"), (of_channel, "float32"), (of_channel, "float32")]
    x, scale, bias, dy = random_normal([*shapes, (of_x, p.dtype)], seed)
    arrays = [
        (x + 1).astype(p.dtype),
        (1 + 0.2 * scale).astype(p.parameters),
        (0.3 * bias).astype(p.parameters),
    ]
    if p.direction == "forward":
        return arrays
    mean, inverse = _statistics(np.asarray(arrays[0].astype(jnp.float32)), p)
    shape = (p.images, p.groups)
    saved = [asarray(v.reshape(shape), jnp.float32) for v in (mean, inverse)]
    return [*arrays, *saved, dy]


def execute(
    *inputs: jax.Array, problem: GroupNormProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    params: Params = {
        "groups": problem.groups,
        "epsilon": problem.epsilon,
        "activation": problem.activation,
    }
    primitive = group_norm_p if problem.direction == "forward" else gradients_p
    return primitive.bind(*inputs, **params, **forced(choice))


def ragged(problem: GroupNormProblem) -> GroupNormProblem:
    """A small problem of the same kind, of a prime number of pixels, or of rows.

    Never of more pixels, which a block might not have room for.
    """
    if problem.pixels == 1:
        return dataclasses.replace(problem, images=101)
    return dataclasses.replace(problem, images=3, pixels=min(problem.pixels, 101))


def judge(
    problem: GroupNormProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """The distance from the formula in float64, in units of what roundings allow."""
    exact = [np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in inputs]
    wanted = exact_results(problem, *exact)

    def error(results: list[jax.Array]) -> float:
        worst = [
            _error(y, value, scale)
            for y, (value, scale) in zip(results, wanted, strict=True)
        ]
        return max(worst)

    return error


def _error(result: jax.Array, wanted: np.ndarray, scale: np.ndarray) -> float:
    found = np.asarray(result.astype(jnp.float32)).astype(np.float64)
    bound = _ROUNDINGS * unit_roundoff(result.dtype.name) * np.abs(wanted)
    bound += _SUMS * unit_roundoff("float32") * scale
    worst = float((np.abs(found - wanted) / bound).max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def _statistics(x: np.ndarray, p: GroupNormProblem) -> tuple[np.ndarray, np.ndarray]:
    """Mean and inverse deviation, (images, 1, groups, 1)."""
    grouped = x.astype(np.float64).reshape(p.images, p.pixels, p.groups, p.of_group)
    mean = _mean(grouped)
    variance = _mean(np.square(grouped - mean))
    return mean, 1 / np.sqrt(variance + p.epsilon)


def _mean(x: np.ndarray) -> np.ndarray:
    """Over pixels and the channels of a group."""
    return np.asarray(x.mean(axis=(1, 3), keepdims=True))


def exact_results(
    problem: GroupNormProblem, *operands: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each result in float64, with the size of the terms that it is made of."""
    p = problem
    x, scale, bias, *rest = operands
    mean, inverse = _statistics(x, p)
    grouped = (p.images, p.pixels, p.groups, p.of_group)
    of_channels = (1, 1, p.groups, p.of_group)
    n = (x.reshape(grouped) - mean) * inverse
    scale = scale.reshape(of_channels)
    z = n * scale + bias.reshape(of_channels)
    if p.direction == "forward":
        y = ACTIVATIONS_F64[p.activation](z)
        size = 1 + np.abs(z) + np.abs(n * scale) + np.abs(mean) * inverse
        statistics = [
            (mean, np.abs(mean) + 1 / inverse),
            (inverse, inverse * (1 + np.abs(mean) * inverse)),
        ]
        return [
            (y.reshape(x.shape), size.reshape(x.shape)),
            *(
                (v.reshape(p.images, p.groups), s.reshape(p.images, p.groups))
                for v, s in statistics
            ),
        ]
    dz = DERIVATIVES_F64[p.activation](z) * rest[-1].reshape(grouped)
    scaled = dz * scale
    dx = inverse * (scaled - _mean(scaled) - n * _mean(scaled * n))
    terms = np.abs(scaled) + _mean(np.abs(scaled)) + 1
    terms = inverse * (terms + np.abs(n) * _mean(np.abs(scaled * n)))
    found: list[tuple[np.ndarray, np.ndarray]] = [
        (dx.reshape(x.shape), terms.reshape(x.shape))
    ]
    for term in (dz * n, dz):
        flat = term.sum((0, 1)).reshape(p.channels)
        found.append((flat, np.abs(term).sum((0, 1)).reshape(p.channels) + 1))
    return found


GROUP_NORM = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
