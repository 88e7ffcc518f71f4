"""Workload of matrix products for the tuner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    operand_roundoff,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.common.exact import ACTIVATIONS_F64, DERIVATIVES_F64
from tracea_jax.ops.common.precision import precision_from_name
from tracea_jax.ops.matmul import stored
from tracea_jax.ops.matmul.definition import split
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.policy import Choice
from tracea_jax.problem import GatedMatmulProblem, GemmProblem

Product = GemmProblem | GatedMatmulProblem  # what concerns only their common fields
Rows = tuple[np.ndarray, np.ndarray]  # exact results, magnitudes of what was summed
ExactRows = Callable[[int, np.ndarray], Rows]  # of these rows of a batch


def check(problem: Product) -> None:
    """Raises ValueError on dtypes or a precision that JAX does not know."""
    for dtype in (problem.lhs, problem.rhs, problem.out):
        check_dtype(dtype)
    precision_from_name(problem.precision)


def execute(
    *inputs: jax.Array, problem: GemmProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice, after what is fused with it."""
    return matmul_p.bind(
        *stored.converted(problem, *inputs),
        layout=problem.layout,
        out=jnp.dtype(problem.out),
        precision=precision_from_name(problem.precision),
        epilogue=problem.epilogue,
        **stored.params_of(problem),
        **forced(choice),
    )


def operands(problem: GemmProblem, seed: int) -> list[jax.Array]:
    """Random normal operands of a problem, in the primitive's order."""
    p, epilogue = problem, problem.epilogue
    batch = (p.batch,) if p.lhs_batched or p.rhs_batched else ()
    shapes = factor_shapes(p)
    if epilogue.bias != "none":
        own = batch if epilogue.bias == "batched_row" else ()
        shapes.append(((*own, p.n), epilogue.bias_dtype or p.out))
    if epilogue.residual:
        shapes.append(((*batch, p.m, p.n), epilogue.residual_dtype or p.out))
    lhs, rhs, *others = random_normal(shapes, seed)
    lhs = stored.as_integers(lhs, p.lhs_stored)
    return [lhs, stored.as_integers(rhs, p.rhs_stored), *others]


def factor_shapes(problem: Product) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of the left and of a right operand, as stored."""
    p = problem
    lhs = (p.m, p.k) if p.layout[0] == "n" else (p.k, p.m)
    rhs = (p.k, p.n) if p.layout[1] == "n" else (p.n, p.k)
    return [
        ((*((p.batch,) if p.lhs_batched else ()), *lhs), p.lhs),
        ((*((p.batch,) if p.rhs_batched else ()), *rhs), p.rhs),
    ]


def ragged(problem: Any) -> Any:
    """A small problem of the same kind that divides no tile but keeps the alignment."""

    def tail(size: int, base: int) -> int:
        step = next(s for s in (8, 4, 2, 1) if size % s == 0)
        return base + step

    return dataclasses.replace(
        problem,
        batch=min(problem.batch, 3),
        m=tail(problem.m, 264),
        n=tail(problem.n, 392),
        k=tail(problem.k, 192),
    )


def worst_error(
    problem: Product,
    device: Device,
    result: jax.Array,
    exact_rows: ExactRows,
    seed: int,
    roundings: int = 1,
) -> float:
    """The largest error against float64, in units of the bound that rounding allows.

    A row from every band of 64 is compared, all columns. With e the unit roundoff of
    the products' operands and E the output's:

        |error| <= roundings E |exact| + 4 sqrt(k) e scale

    Not-a-number anywhere in the result counts as infinite.

    Args:
      exact_rows: (batch, rows) -> exact results of these rows, and their scale.
      roundings: to the output's dtype on the way to the result.
    """
    if not bool(jnp.isfinite(result).all()):
        return float("inf")
    found = result.reshape(problem.batch, problem.m, problem.n)
    rng = np.random.default_rng(seed)
    starts = np.arange(0, problem.m, 64)
    rows = np.minimum(starts + rng.integers(0, 64, starts.size), problem.m - 1)
    rows = np.unique(np.concatenate([rows, [0, problem.m - 1]]))
    unit = operand_roundoff((problem.lhs, problem.rhs), problem.precision, device)
    worst = 0.0
    for b in np.unique([0, problem.batch // 2, problem.batch - 1]):
        exact, scale = exact_rows(b, rows)
        bound = roundings * unit_roundoff(problem.out) * np.abs(exact)
        bound += 4 * np.sqrt(problem.k + 1) * unit * scale
        error = np.abs(_f64(found[b][rows].astype(jnp.float32)) - exact)
        worst = max(worst, float((error / np.maximum(bound, 1e-30)).max()))
    return worst


def remembered(exact_rows: ExactRows) -> ExactRows:
    """The same for callers that ask for the same rows of a batch again and again."""
    known: dict[int, Rows] = {}

    def rows_of(b: int, rows: np.ndarray) -> Rows:
        if b not in known:
            known[b] = exact_rows(b, rows)
        return known[b]

    return rows_of


def product_rows(
    layout: str, lhs: jax.Array, rhs: jax.Array, b: int, rows: np.ndarray
) -> Rows:
    """Some rows of batch b of a product in float64, and their scale |A| |B|."""
    left, right = (_f64(x[b] if x.ndim == 3 else x) for x in (lhs, rhs))
    left = (left if layout[0] == "n" else left.T)[rows]
    right = right if layout[1] == "n" else right.T
    return left @ right, np.abs(left) @ np.abs(right)


def _exact_rows(
    problem: GemmProblem, inputs: list[jax.Array], which: str, b: int, rows: np.ndarray
) -> Rows:
    lhs, rhs, bias, residual = split(inputs, problem.epilogue)
    exact, scale = product_rows(problem.layout, lhs, rhs, b, rows)
    if bias is not None:
        bias = _f64(bias[b] if bias.ndim == 2 else bias)
        exact, scale = exact + bias, scale + np.abs(bias)
    if problem.epilogue.is_derivative:
        assert residual is not None
        z = _f64(residual.reshape(-1, problem.m, problem.n)[b])[rows]
        slope = DERIVATIVES_F64[problem.epilogue.activation](z)
        # Where the slope is 0 its error, of functions about 1, is not.
        return exact * slope, scale * np.maximum(np.abs(slope), 1)
    if which == "y":
        exact = ACTIVATIONS_F64[problem.epilogue.activation](exact)
        if residual is not None:
            residual = _f64(residual.reshape(-1, problem.m, problem.n)[b])[rows]
            if problem.epilogue.residual_op == "add":
                exact, scale = exact + residual, scale + np.abs(residual)
            else:
                exact, scale = exact * residual, scale * np.abs(residual)
    return exact, scale


def _f64(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def judge(
    problem: GemmProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """The ``worst_error`` of y and z, on the scale |A| |B| + |bias| + |residual|.

    Column sums are judged by y, see ``worst_sum_error``.
    """
    exact = {
        w: remembered(functools.partial(_exact_rows, problem, inputs, w)) for w in "yz"
    }

    def error(results: list[jax.Array]) -> float:
        errors: list[float] = []
        if problem.epilogue.column_sums and len(results) > 1:
            *results, sums = results
            errors.append(worst_sum_error(results[0], sums))
        for which, result in zip("yz", results, strict=False):
            errors.append(worst_error(problem, device, result, exact[which], seed))
        return max(errors)

    return error


def worst_sum_error(y: jax.Array, sums: jax.Array) -> float:
    """The largest error of column sums, in units of what roundings of y can add up to.

    With E the unit roundoff of y, they are E sqrt(sum of y^2) if independent, of which
    8 are allowed, beside those of the sum in float32.
    """
    rows = y.reshape(-1, y.shape[-1]).astype(jnp.float32)
    exact = np.asarray(rows).sum(0, dtype=np.float64)
    squares = np.asarray(jnp.square(rows).sum(0), np.float64)
    unit = unit_roundoff(y.dtype.name) + 2.0**-20
    error = np.abs(np.asarray(sums, np.float64) - exact)
    worst = float((error / np.maximum(8 * unit * np.sqrt(squares), 1e-30)).max())
    return worst if np.isfinite(worst) else float("inf")


MATMUL = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
assert set(ACTIVATIONS_F64) == set(epilogues.ACTIVATION_FUNCTIONS)
