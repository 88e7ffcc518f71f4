"""Runs of conv2d_cpu through XLA, and their results in float64, for its tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numerics
import numpy as np
from numerics import Exact, f64, normal

from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.ops.conv2d.workload import _shape
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants import CpuCall
from tracea_jax.variants.conv2d_cpu import (
    CONV2D_CPU,
    Conv2dCpuConfig,
)

ISAS = CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]
DIRECTIONS = tuple(ROLES)
SMALL = Conv2dCpuConfig(kc=32, nc=32, tasks=2)  # several blocks of everything, soon
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)


def conv(
    size: tuple[int, int, int] = (2, 9, 11),
    channels: tuple[int, int] = (19, 37),
    kernel: tuple[int, int] = (3, 3),
    dtype: str = "float32",
    **changes: Any,
) -> Conv2dProblem:
    fields: dict[str, Any] = {"padding": ((1, 1), (1, 1))}
    fields |= {"lhs": dtype, "rhs": dtype, "out": dtype, **changes}
    return Conv2dProblem(
        **dict(zip(("batch", "height", "width"), size, strict=True)),
        **dict(zip(("in_channels", "out_channels"), channels, strict=True)),
        **dict(zip(("kernel_height", "kernel_width"), kernel, strict=True)),
        **fields,
    )


def operands(problem: Conv2dProblem, seed: int = 0) -> list[jax.Array]:
    p, epilogue = problem, problem.epilogue
    lhs, rhs, _ = ROLES[p.direction]
    shapes = [(_shape(p, lhs), p.lhs), (_shape(p, rhs), p.rhs)]
    if epilogue.bias != "none":
        shapes.append(((p.out_channels,), epilogue.bias_dtype or p.out))
    if epilogue.residual:
        shapes.append((_shape(p, "y"), epilogue.residual_dtype or p.out))
    return [normal(*s, dtype=d, seed=seed + i) for i, (s, d) in enumerate(shapes)]


def all_directions(problem: Conv2dProblem) -> list[Conv2dProblem]:
    plain = dataclasses.replace(problem, epilogue=Epilogue())
    return [problem] + [
        dataclasses.replace(plain, direction=direction) for direction in DIRECTIONS[1:]
    ]


def call_of(problem: Conv2dProblem, config: Conv2dCpuConfig, isa: str) -> CpuCall:
    device = dataclasses.replace(local_cpu(), isa=isa)
    assert CONV2D_CPU.why_not(problem, device) is None
    CONV2D_CPU.check(problem, config, device)
    call = CONV2D_CPU.call(problem, config, device)
    assert isinstance(call, CpuCall)
    return call


Run = tuple[Conv2dProblem, list[jax.Array], Conv2dCpuConfig, str]


def run_all(runs: list[Run]) -> list[list[jax.Array]]:
    """The kernel's results, written into buffers that held nothing but NaN.

    All in one program, as compiling one takes longer than running it.
    """
    shapes, kernels = [], []
    for problem, _, config, isa in runs:
        call = call_of(problem, config, isa)
        shape = _shape(problem, ROLES[problem.direction][2])
        count = 1 + problem.epilogue.save_preactivation
        shapes.append([jax.ShapeDtypeStruct(shape, problem.out)] * count)
        kernel = jax.ffi.ffi_call(call.target, shapes[-1])
        kernels.append(functools.partial(kernel, **dict(call.attributes)))

    def program(poison, inputs):
        del poison
        return [kernel(*x) for kernel, x in zip(kernels, inputs, strict=True)]

    poison = jax.tree.map(lambda x: numerics.poison(x.shape, x.dtype), shapes)
    places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(poison)}
    run = jax.jit(program, donate_argnums=0, keep_unused=True)
    found = run(poison, [inputs for _, inputs, *_ in runs])
    assert places >= {
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(found) if x.size
    }
    return found


def sums(problem: Conv2dProblem, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """The direction's result in float64, tap by tap."""
    p, groups = problem, problem.groups
    lhs_role, rhs_role, result_role = ROLES[p.direction]
    arrays = {role: np.zeros(_shape(p, role)) for role in "xwy"}
    arrays[lhs_role], arrays[rhs_role] = lhs, rhs
    x, w, y = (
        a.reshape(*a.shape[:3], groups, a.shape[3] // groups) for a in arrays.values()
    )
    product = functools.partial(np.einsum, optimize=groups == 1)
    for r, s in np.ndindex(p.kernel_height, p.kernel_width):
        pairs = [
            [
                (out, i)
                for out in range(count)
                if 0 <= (i := out * step + tap * apart - pad[0]) < size
            ]
            for tap, count, step, apart, pad, size in zip(
                *((r, s), p.out_size, p.strides, p.dilation, p.padding),
                (p.height, p.width),
                strict=True,
            )
        ]
        if not all(pairs):
            continue
        outs, ins = zip(*(zip(*axis, strict=True) for axis in pairs), strict=True)
        every = range(p.batch)
        at_y, at_x = np.ix_(every, *outs), np.ix_(every, *ins)
        if result_role == "y":
            y[at_y] += product("nhwgc,cgo->nhwgo", x[at_x], w[r, s])
        elif result_role == "x":
            x[at_x] += product("nhwgo,cgo->nhwgc", y[at_y], w[r, s])
        else:
            w[r, s] += product("nhwgc,nhwgo->cgo", x[at_x], y[at_y])
    shape = _shape(p, result_role)
    return {"x": x, "w": w, "y": y}[result_role].reshape(shape)


def expected(problem: Conv2dProblem, inputs: list[jax.Array]) -> list[Exact]:
    """The results in float64: y, and z if it is saved."""
    lhs, rhs, *added = (f64(x) for x in inputs)
    value, scale = (
        sums(problem, a, b) for a, b in ((lhs, rhs), (np.abs(lhs), np.abs(rhs)))
    )
    for term in added:
        value, scale = value + term, scale + np.abs(term)
    y = numerics.activate(value, problem.epilogue.activation)
    exact = [Exact(value=v, scale=scale) for v in (y, value)]
    return exact[: 1 + problem.epilogue.save_preactivation]


def compare(exact: list[Exact], found: list[jax.Array]) -> None:
    """Asserts that the results are right to the last rounding."""
    for each, result in zip(exact, found, strict=True):
        each.assert_near(result)


def run_and_check(
    *problems: Conv2dProblem,
    config: Conv2dCpuConfig = SMALL,
    isa: str = cpu_isa(),
) -> None:
    runs = [(p, operands(p, i), config, isa) for i, p in enumerate(problems)]
    for (problem, inputs, *_), found in zip(runs, run_all(runs), strict=True):
        compare(expected(problem, inputs), found)
