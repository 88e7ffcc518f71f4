"""Products of gemm_cpu in poisoned buffers, and checks of them, for its tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numerics
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
    return results_of_all([problem], [inputs], config, isa)[0]


def results_of_all(
    problems: Sequence[GemmProblem],
    inputs: Sequence[list[jax.Array]],
    config: GemmCpuConfig = SMALL,
    isa: str = cpu_isa(),
) -> list[list[jax.Array]]:
    """As ``results``, in one program, which compiles sooner than one for each."""
    calls = [call_of(problem, config, isa) for problem in problems]
    shapes = [
        [jax.ShapeDtypeStruct(_shape(p), p.out)] * (1 + p.epilogue.save_preactivation)
        for p in problems
    ]
    kernels = [
        jax.ffi.ffi_call(call.target, like)
        for call, like in zip(calls, shapes, strict=True)
    ]

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def run(poison, inputs):
        return [
            kernel(*some, **dict(call.attributes))
            for kernel, call, some in zip(kernels, calls, inputs, strict=True)
        ]

    poison = [[numerics.poison(x.shape, x.dtype) for x in like] for like in shapes]
    places = [[x.unsafe_buffer_pointer() for x in some] for some in poison]
    found = run(poison, list(inputs))
    for some, before in zip(found, places, strict=True):
        after = [x.unsafe_buffer_pointer() for x in some]
        assert some[0].size == 0 or before == after
    return found


def _shape(problem: GemmProblem) -> tuple[int, ...]:
    batch = [problem.batch] if problem.lhs_batched or problem.rhs_batched else []
    return (*batch, problem.m, problem.n)


@functools.lru_cache(maxsize=4)
def _expected(problem: GemmProblem) -> tuple[list[jax.Array], Any]:
    """Operands, and what is right: of one problem for all configs."""
    inputs = operands(problem)
    return inputs, numerics.exact_gemm(problem.layout, problem.epilogue, *inputs)


def run_and_check(*problems: GemmProblem, **how: Any) -> None:
    """Asserts that y, and z if it is saved, are right to the last rounding.

    Args:
      *problems: run in one program.
      **how: config and isa, as of ``results``.
    """
    inputs, expected = zip(*map(_expected, problems), strict=True)
    for found, right in zip(
        results_of_all(problems, inputs, **how), expected, strict=True
    ):
        for y, x in zip(right, found, strict=True):
            y.assert_near(x)
