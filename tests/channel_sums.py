"""Problems of two sums of each channel, and their sums in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numerics import f64

from tracea_jax.ops.channel_sums import workload
from tracea_jax.problem import ChannelSumsProblem

KINDS = {
    "moments": {"kind": "moments"},
    "gradient": {"kind": "gradient"},
    "argument": {"kind": "gradient", "relu": "argument"},
    "result": {"kind": "gradient", "relu": "result"},
    "two": {"kind": "gradient", "relu": "result", "cotangents": 2},
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
    found = run(*inputs)
    for y, value, size in zip(found[:2], wanted[:2], sizes, strict=True):
        assert y.dtype == np.float32
        assert (np.abs(np.asarray(y) - value) <= UNITS * size).all()
    for y, value in zip(found[2:], wanted[2:], strict=True):
        assert y.dtype == inputs[0].dtype
        np.testing.assert_array_equal(f64(y).reshape(value.shape), value)
