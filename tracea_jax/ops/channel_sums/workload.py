"""Workload of two sums of each channel for the tuner."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.channel_sums.primitive import channel_sums_p, least
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.common.typed import asarray
from tracea_jax.policy import Choice
from tracea_jax.problem import ChannelSumsProblem

_ROUNDINGS = 64  # of terms whose sums are cut into many


def check(problem: ChannelSumsProblem) -> None:
    """Raises ValueError on what cannot be run."""
    check_dtype(problem.dtype)


def operands(problem: ChannelSumsProblem, seed: int) -> list[jax.Array]:
    """Standard normal operands, in the order of the primitive."""
    array = (problem.rows, problem.channels), problem.dtype
    each = (problem.channels,), "float32"
    arrays = ("x", "dy", "more", "y")
    shapes: list[Any] = [array if name in arrays else each for name in problem.operands]
    return random_normal(shapes, seed)


def execute(
    *inputs: jax.Array, problem: ChannelSumsProblem, choice: Choice
) -> list[jax.Array]:
    """The primitive, forced to one choice."""
    return channel_sums_p.bind(*inputs, relu=problem.relu, **forced(choice))


def ragged(problem: ChannelSumsProblem) -> ChannelSumsProblem:
    """A small problem of the same kind, of a prime number of rows."""
    return dataclasses.replace(problem, rows=1009, channels=72)


def judge(
    problem: ChannelSumsProblem,
    device: Device,
    inputs: list[jax.Array],
    seed: int,
) -> Judge:
    """See ``Workload``: the distance from sums in float64."""
    wanted, sizes = exact(problem, *inputs)
    unit = unit_roundoff("float32") * _ROUNDINGS

    def error(results: list[jax.Array]) -> float:
        pairs = zip(results, wanted, sizes, strict=False)  # dz is what the sums are of
        worst = max(
            float((np.abs(np.asarray(y, np.float64) - z) / (size * unit)).max())
            for y, z, size in pairs
        )
        return worst if np.isfinite(worst) else float("inf")

    return error


def exact(
    problem: ChannelSumsProblem, *inputs: jax.Array
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both sums in float64, and the sums of the terms' magnitudes; then dz, if kept."""
    given = dict(zip(problem.operands, map(_f64, inputs), strict=True))
    x, dtype = given["x"], inputs[0].dtype
    kept: list[np.ndarray] = []
    if not problem.is_gradient:
        terms = [x, x * x]
    else:
        v = x - given["center"]
        dz = given["dy"]
        if problem.cotangents == 2:
            dz = _f64(asarray(dz + given["more"], jnp.float32).astype(dtype))
        if problem.relu == "argument":
            argument = v * given["factor"] + given["shift"]
            dz = np.where(argument > least(dtype), dz, 0.0)
        elif problem.keeps:
            dz = np.where(given["y"] > 0, dz, 0.0)
            kept = [dz]
        terms = [dz, dz * v]
    axes = tuple(range(x.ndim - 1))
    sizes = [np.abs(t).sum(axes) + np.finfo(np.float32).tiny for t in terms]
    return [*(t.sum(axes) for t in terms), *kept], sizes


def _f64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


WORKLOAD = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
