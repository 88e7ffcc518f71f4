"""How kernels of attention are checked on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ahead import compiled_ahead
from numerics import normal
from spaces import one_of_each

from tracea_jax.ops.attention import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem


def run_and_check(variant: Any, problem: AttentionProblem, config: Any = None) -> None:
    """Runs a variant in buffers full of NaN and compares with float64.

    Two runs must give the same bits.
    """
    device = device_for("cuda")
    config = config or variant.heuristic(problem, device)
    inputs = bench.operands(problem, seed=3)
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    found = call(poison, *inputs)
    for first, second in zip(found, call(again, *inputs), strict=True):
        np.testing.assert_array_equal(first, second, strict=True)
    error = bench.error(problem, device, inputs, found, seed=3)
    assert error <= 1, f"{error:.3g} of the allowed error: {config}"


def sweep(variant: Any, problem: AttentionProblem, *fields: str) -> int:
    """``run_and_check`` of a config for each combination of these fields."""
    device = device_for("cuda")
    configs = one_of_each(variant.space(problem, device), *fields)
    choices = [Choice(variant=variant.name, config=config) for config in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            run_and_check(variant, problem, config)
    return len(configs)


def arguments(q_len: int, kv_len: int, head_dim: int = 64) -> list[jax.Array]:
    """Random q, k, v of two examples; two heads share keys."""
    k = (2, kv_len, 2, head_dim)
    shapes = ((2, q_len, 4, head_dim), k, k)
    return [normal(*s, seed=i).astype("bfloat16") for i, s in enumerate(shapes)]
