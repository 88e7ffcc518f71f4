"""How two sums of each channel are run and judged by the tuner."""

from __future__ import annotations

import dataclasses

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
    if not problem.is_gradient:
        return random_normal([array], seed)
    of_relu = 2 * (problem.activation == "relu")
    return random_normal([array, array, each, *[each] * of_relu], seed)


def execute(
    *inputs: jax.Array, problem: ChannelSumsProblem, choice: Choice
) -> list[jax.Array]:
    """The primitive, forced to one choice."""
    return channel_sums_p.bind(*inputs, **forced(choice))


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
        pairs = zip(results, wanted, sizes, strict=True)
        worst = max(
            float((np.abs(np.asarray(y, np.float64) - z) / (size * unit)).max())
            for y, z, size in pairs
        )
        return worst if np.isfinite(worst) else float("inf")

    return error


def exact(
    problem: ChannelSumsProblem, x: jax.Array, *others: jax.Array
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both sums in float64, and the sums of the terms' magnitudes."""
    wide, *rest = (_f64(a) for a in (x, *others))
    if not rest:
        terms = [wide, wide * wide]
    else:
        dz, center, *of_relu = rest
        v = wide - center
        if of_relu:
            dz = np.where(v * of_relu[0] + of_relu[1] > least(x.dtype), dz, 0.0)
        terms = [dz, dz * v]
    axes = tuple(range(wide.ndim - 1))
    sizes = [np.abs(t).sum(axes) + np.finfo(np.float32).tiny for t in terms]
    return [t.sum(axes) for t in terms], sizes


def _f64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


WORKLOAD = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
