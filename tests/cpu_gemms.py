"""Products of gemm_cpu in poisoned buffers, and checks of them, for its tests."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numerics
import numpy as np
from numerics import normal

from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants import CpuCall
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig

ISAS = CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]
SMALL = GemmCpuConfig(kc=24, nc=40, tasks=2)  # several blocks of everything, soon
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
GATE = dataclasses.replace(FULL, activation="silu", residual_op="multiply")


def gemm(m: int, n: int, k: int, dtype: str = "float32", **changes) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **changes}
    return GemmProblem(m=m, n=n, k=k, **fields)


def operands(problem: GemmProblem) -> list[jax.Array]:
    p, epilogue = problem, problem.epilogue
    batch = [p.batch] if p.lhs_batched or p.rhs_batched else []
    lhs = [p.m, p.k] if p.layout[0] == "n" else [p.k, p.m]
    rhs = [p.k, p.n] if p.layout[1] == "n" else [p.n, p.k]
    shapes = [
        ([*(batch if p.lhs_batched else []), *lhs], p.lhs),
        ([*(batch if p.rhs_batched else []), *rhs], p.rhs),
    ]
    if epilogue.bias != "none":
        own = batch if epilogue.bias == "batched_row" else []
        shapes.append(([*own, p.n], epilogue.bias_dtype or p.out))
    if epilogue.residual:
        shapes.append(([*batch, p.m, p.n], epilogue.residual_dtype or p.out))
    return [normal(*s, dtype=d, seed=i) for i, (s, d) in enumerate(shapes)]


def call_of(problem: GemmProblem, config: GemmCpuConfig, isa: str) -> CpuCall:
    device = dataclasses.replace(local_cpu(), isa=isa)
    GEMM_CPU.check(problem, config, device)
    call = GEMM_CPU.call(problem, config, device)
    assert isinstance(call, CpuCall)
    return call


def results(
    problem: GemmProblem,
    inputs: list[jax.Array],
    config: GemmCpuConfig = SMALL,
    isa: str = cpu_isa(),
) -> list[jax.Array]:
    """The kernel's results, written into buffers that held nothing but NaN."""
    call = call_of(problem, config, isa)
    batch = [problem.batch] if problem.lhs_batched or problem.rhs_batched else []
    shape = (*batch, problem.m, problem.n)
    count = 1 + problem.epilogue.save_preactivation
    kernel = jax.ffi.ffi_call(
        call.target, [jax.ShapeDtypeStruct(shape, problem.out)] * count
    )
    run = jax.jit(
        lambda poison, *inputs: kernel(*inputs, **dict(call.attributes)),
        donate_argnums=0,
        keep_unused=True,
    )
    nan = np.full(shape, np.nan, problem.out)
    poison = [jnp.array(nan) for _ in range(count)]
    places = [x.unsafe_buffer_pointer() for x in poison]
    found = run(poison, *inputs)
    assert math.prod(shape) == 0 or places == [x.unsafe_buffer_pointer() for x in found]
    return found


def check(
    problem: GemmProblem, found: list[jax.Array], inputs: list[jax.Array]
) -> None:
    """Asserts that y, and z if it is saved, are right to the last rounding."""
    expected = numerics.exact_gemm(problem.layout, problem.epilogue, *inputs)
    for y, x in zip(expected, found, strict=True):
        y.assert_near(x)


def run_and_check(problem: GemmProblem, **how) -> None:
    inputs = operands(problem)
    check(problem, results(problem, inputs, **how), inputs)
