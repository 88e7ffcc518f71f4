"""Products on gemm_sm90, run in poisoned memory and compared with float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ahead import compiled_ahead
from numerics import Exact, exact_gemm
from spaces import one_of_each

from tracea_jax.ops.matmul import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

LAYOUTS = ("nn", "nt", "tn", "tt")
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
GATE = Epilogue(
    activation="silu", residual=True, residual_op="multiply", save_preactivation=True
)
GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", **changes) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **changes}
    return GemmProblem(m=m, n=n, k=k, **fields)


def run_and_check(problem: GemmProblem, config=None, unit: float = 2.0**-24) -> None:
    """Runs the kernel in buffers full of NaN and compares every entry with float64.

    Two runs must give the same bits.
    """
    config = config or GEMM_SM90.heuristic(problem, device_for("cuda"))
    inputs, expected = operands_and_results(problem)
    choice = Choice(variant="gemm_sm90", config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    found = call(poison, *inputs)
    for first, second in zip(found, call(again, *inputs), strict=True):
        np.testing.assert_array_equal(first, second, strict=True)
    for y, x in zip(expected, found, strict=True):
        y.assert_near(x, unit=unit)


@functools.lru_cache(maxsize=1)  # a sweep asks for the same ones again and again
def operands_and_results(
    problem: GemmProblem,
) -> tuple[tuple[jax.Array, ...], tuple[Exact, ...]]:
    """Operands of a problem, and what its results must be."""
    inputs = tuple(bench.operands(problem, seed=3))
    return inputs, tuple(exact_gemm(problem.layout, problem.epilogue, *inputs))


def sweep(problem: GemmProblem, *fields: str, unit: float = 2.0**-24, **only) -> int:
    """``run_and_check`` of a config for each combination of these fields.

    Args:
      only: fields and predicates that the configs must fulfil.
    """
    device = device_for("cuda")
    configs = [
        config
        for config in one_of_each(GEMM_SM90.space(problem, device), *fields)
        if all(is_meant(getattr(config, name)) for name, is_meant in only.items())
    ]
    choices = [Choice(variant="gemm_sm90", config=config) for config in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            run_and_check(problem, config, unit)
    return len(configs)
