"""Matrix products with an epilogue in jnp, and the problems that they are.

Operands and parameters are those of ``primitive``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.precision import precision_name
from tracea_jax.ops.common.ranks import Ranks, over_rows
from tracea_jax.ops.common.typed import Aval, lax
from tracea_jax.ops.matmul.stored import NONE, Stored
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.problem.gemm import Layout

T = TypeVar("T")  # one thing for each operand: its array, tangent, type or axis


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    ranks: Ranks | None = None,
) -> jax.Array:
    """op(lhs) @ op(rhs) as one ``lax.dot_general``.

    Where dtypes differ, as of a float32 cotangent and bfloat16 weights, no operand is
    rounded: XLA would round both to a narrower result's dtype.
    """
    mixed = lhs.dtype != rhs.dtype
    ranks = ranks or Ranks.of(lhs, rhs, {})
    acc = lax.dot_general(
        lhs,
        rhs,
        ranks.dot_dimensions(lhs, rhs, layout),
        precision=precision,
        preferred_element_type=epilogues.written_dtype(out, lhs, rhs) if mixed else out,
    ).astype(out)
    if ranks.has_batch(lhs, rhs) != (False, True):
        return acc
    first, last = range(ranks.rows), range(ranks.rows, ranks.rows + ranks.batch)
    return acc.transpose(*last, *first, *range(last.stop, acc.ndim))


def split(operands: Sequence[T], epilogue: Epilogue) -> tuple[T, T, T | None, T | None]:
    """(lhs, rhs, bias or None, residual or None) of the primitive's operands."""
    lhs, rhs, *rest = operands
    bias = rest.pop(0) if epilogue.bias != "none" else None
    return lhs, rhs, bias, rest.pop(0) if epilogue.residual else None


def reference(
    *operands: jax.Array,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    **params: Any,
) -> list[jax.Array]:
    """The primitive in jnp: the default lowering and the tests' oracle."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    wide = epilogues.accumulator_dtype(epilogue, lhs.dtype, rhs.dtype, out)
    ranks = Ranks.of(lhs, rhs, params)
    acc = product(lhs, rhs, layout=layout, out=wide, precision=precision, ranks=ranks)
    bias = of_batches(bias, epilogue, ranks)
    return epilogues.apply(acc, epilogue, bias, residual, out)


def written(
    *operands: jax.Array,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    **params: Any,
) -> list[jax.Array]:
    """The primitive as people write it in jnp, every step rounded: XLA's variant."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    dtype = epilogues.written_dtype(out, bias, residual)
    ranks = Ranks.of(lhs, rhs, params)
    acc = product(lhs, rhs, layout=layout, out=dtype, precision=precision, ranks=ranks)
    bias = of_batches(bias, epilogue, ranks)
    return epilogues.apply(acc, epilogue, bias, residual, out)


def of_batches(
    bias: jax.Array | None, epilogue: Epilogue, ranks: Ranks
) -> jax.Array | None:
    if bias is None:
        return None
    return over_rows(bias, ranks, epilogue.bias == "batched_row")


def problem_of(
    avals: Sequence[Aval],
    *,
    layout: Layout,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    stored: Stored = NONE,
    **params: Any,
) -> GemmProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    lhs, rhs, bias, residual = split(avals, epilogue)
    ranks = Ranks.of(lhs, rhs, params)
    left, right = ranks.lhs(lhs, layout[0]), ranks.rhs(rhs, layout[1])
    return GemmProblem(
        batch=math.prod(left.batch or right.batch),
        m=math.prod(left.outer),
        k=math.prod(left.contraction),
        n=math.prod(right.outer),
        lhs=lhs.dtype.name,
        rhs=rhs.dtype.name,
        out=jnp.dtype(out).name,
        layout=layout,
        lhs_batched=bool(left.batch),
        rhs_batched=bool(right.batch),
        precision=precision_name(precision),
        epilogue=dataclasses.replace(
            epilogue,
            bias_dtype=epilogues.other_dtype(bias, out),
            residual_dtype=epilogues.other_dtype(residual, out),
        ),
        **dict(zip(("lhs_stored", "rhs_stored"), stored, strict=True)),
    )
