"""Kernels that walk down images, run in poisoned memory and compared exactly."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from depthwise import exactly

from tracea_jax.ops.conv2d import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem


def executed(
    variant: Any, problem: Conv2dProblem, inputs: Any, config: Any = None
) -> list[Any]:
    """The results of two runs of the same bits, in buffers full of NaN."""
    device = device_for("cuda")
    assert variant.why_not(problem, device) is None
    config = config or variant.heuristic(problem, device)
    variant.check(problem, config, device)
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    results = call(poison, *inputs)
    for first, second in zip(results, call(again, *inputs), strict=True):
        same = np.asarray(first).view(np.uint8), np.asarray(second).view(np.uint8)
        np.testing.assert_array_equal(*same, strict=True)  # bits, also those of NaN
    return list(results)


def check(variant: Any, problem: Conv2dProblem, config: Any = None) -> None:
    """Small whole numbers, of which every sum is exact."""
    inputs, wanted = exactly(problem)
    for found, exact in zip(
        executed(variant, problem, inputs, config), wanted, strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(found, np.float64), exact, err_msg=f"{problem} {config}"
        )
