"""Problems of two sums of each channel, and their sums in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tracea_jax.ops.channel_sums import workload
from tracea_jax.problem import ChannelSumsProblem

KINDS = {
    "moments": {"kind": "moments"},
    "gradient": {"kind": "gradient"},
    "relu": {"kind": "gradient", "activation": "relu"},
}
UNITS = 2.0**-20  # of the sum of magnitudes: some rounding of f32 in a tree of sums


def sums(rows: int, channels: int, kind: str, dtype: str) -> ChannelSumsProblem:
    return ChannelSumsProblem(rows=rows, channels=channels, dtype=dtype, **KINDS[kind])


def check(problem: ChannelSumsProblem, choice: Any, shape: Any = None) -> None:
    """Compares the sums of a choice with float64."""
    inputs = workload.operands(problem, seed=3)
    if shape is not None:
        inputs = [x.reshape(shape) if x.ndim == 2 else x for x in inputs]
    wanted, sizes = workload.exact(problem, *inputs)
    run = jax.jit(lambda *x: workload.execute(*x, problem=problem, choice=choice))
    for found, value, size in zip(run(*inputs), wanted, sizes, strict=True):
        assert found.dtype == np.float32
        assert (np.abs(np.asarray(found) - value) <= UNITS * size).all()
