"""Convolutions run on a GPU by one variant, and compared with float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from convolutions import exact
from numerics import Exact, f64

from tracea_jax.ops.conv2d import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue

FULL = Epilogue(bias="row", activation="silu", residual=True, save_preactivation=True)
AWKWARD: dict[str, Any] = {
    **{"batch": 3, "height": 13, "width": 11, "in_channels": 72, "out_channels": 200},
    **{"kernel_height": 3, "kernel_width": 2, "padding": ((1, 2), (0, 1))},
}

SHAPES: dict[str, dict[str, Any]] = {
    "one pixel": {"batch": 1, "height": 1, "width": 1},
    "one result": {"height": 3, "width": 2, "padding": ((0, 0), (0, 0))},
    "primes": {"batch": 5, "height": 31, "width": 29, "out_channels": 88},
    "one row": {"height": 1, "kernel_height": 1, "padding": ((0, 0), (2, 3))},
    "one column": {"width": 1, "kernel_width": 1, "padding": ((3, 1), (0, 0))},
    "pointwise": {"kernel_height": 1, "kernel_width": 1, "padding": ((0, 0),) * 2},
    "padding beyond the kernel": {"padding": ((7, 5), (9, 0))},
    "cropped": {"padding": ((-2, 1), (1, -3))},
    "large kernel": {
        **{"kernel_height": 7, "kernel_width": 9, "padding": ((3, 3), (4, 4))}
    },
    "dilated": {"dilation": (2, 3), "padding": ((2, 2), (3, 1))},
    "strided": {"strides": (2, 2), "padding": ((1, 1), (1, 1)), "kernel_width": 3},
    "strided rows": {"strides": (2, 1)},
    "strided columns": {"strides": (1, 2), "kernel_width": 5},
    "strided and dilated": {"strides": (2, 2), "dilation": (2, 3), "width": 17},
    "strided pixels": {
        **{"kernel_height": 1, "kernel_width": 1, "padding": ((0, 0),) * 2},
        **{"strides": (2, 2)},
    },
    "many": {"batch": 64, "height": 56, "width": 56, "out_channels": 64},
}


def conv(dtype: Any = "bfloat16", **changes: Any) -> Conv2dProblem:
    fields: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": dtype, **AWKWARD}
    return Conv2dProblem(**{**fields, **changes})


def executed(variant: Any, problem: Conv2dProblem, config: Any = None) -> Any:
    """Operands, and the results of the kernel run in buffers full of NaN."""
    device = device_for("cuda")
    assert variant.why_not(problem, device) is None
    config = config or variant.heuristic(problem, device)
    variant.check(problem, config, device)
    inputs = bench.operands(problem, seed=3)
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    return inputs, call(poison, *inputs)


def run_and_check(
    variant: Any, problem: Conv2dProblem, *configs: Any, ties_to_even: bool = False
) -> None:
    """Compares every entry of the results of each config with float64.

    Args:
      variant, problem, configs: what is run.
      ties_to_even: whether float32 is rounded so, as tensor maps do.
    """
    wanted: list[Exact] = []
    is_tf32 = problem.lhs == "float32"
    for config in configs or (None,):
        inputs, found = executed(variant, problem, config)
        if not wanted:
            rounded = inputs[:2]
            if is_tf32:
                rounded = [tf32(x, ties_to_even=ties_to_even) for x in rounded]
            wanted = expected(problem, [*rounded, *inputs[2:]])
        for y, x in zip(wanted, found, strict=True):
            # The tensor cores cut the sums of products of TF32 off.
            y.assert_near(x, unit=2.0**-22 if is_tf32 else 2.0**-24)


def tf32(x: Any, *, ties_to_even: bool = False) -> np.ndarray:
    """Finite float32 numbers rounded to 11 significant bits, ties away from zero."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    half = 0x0FFF + (bits >> 13 & 1) if ties_to_even else 0x1000
    return ((bits + half) & 0xFFFFE000).view(np.float32)


def expected(problem: Conv2dProblem, inputs: Any) -> list[Exact]:
    if problem.direction == "input_grad":
        return [input_gradient(problem, *inputs)]
    epilogue = problem.epilogue
    x, w, *others = inputs
    bias = others.pop(0) if epilogue.bias != "none" else None
    residual = others.pop(0) if epilogue.residual else None
    how: dict[str, Any] = {
        name: getattr(problem, name)
        for name in ("strides", "padding", "dilation", "groups")
    }
    y = exact(x, w, bias, residual, epilogue.activation, **how)
    z = exact(x, w, bias, residual, **how)
    return [y, z] if epilogue.save_preactivation else [y]


def input_gradient(problem: Conv2dProblem, dy: Any, w: Any) -> Exact:
    """The transpose of the convolution in float64, tap by tap."""
    p = problem
    dy, w = (f64(a).reshape(*a.shape[:3], p.groups, -1) for a in (dy, w))
    shape = (p.batch, p.height, p.width, p.groups, p.in_channels // p.groups)
    value, scale = np.zeros(shape), np.zeros(shape)
    for i, j in itertools.product(range(p.kernel_height), range(p.kernel_width)):
        rows, of_rows = met(p, 0, i)
        columns, of_columns = met(p, 1, j)
        seen = dy[:, of_rows][:, :, of_columns]
        at = np.ix_(range(p.batch), rows, columns)
        for g in range(p.groups):
            dx, met_w = seen[..., g, :], w[i, j, :, g].T
            value[*at, g] += dx @ met_w
            scale[*at, g] += np.abs(dx) @ np.abs(met_w)
    flat = (*shape[:3], p.in_channels)
    return Exact(value=value.reshape(flat), scale=scale.reshape(flat))


def met(p: Conv2dProblem, axis: int, tap: int) -> tuple[list[int], list[int]]:
    """Entries of x and of y that a tap joins."""
    size = (p.height, p.width)[axis]
    pairs = [
        (out * p.strides[axis] + tap * p.dilation[axis] - p.padding[axis][0], out)
        for out in range(p.out_size[axis])
    ]
    pairs = [(at, out) for at, out in pairs if 0 <= at < size]
    return [at for at, _ in pairs], [out for _, out in pairs]
