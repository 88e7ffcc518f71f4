"""Operands that a program converts from narrow integers, in front of a product.

The primitives have a parameter ``stored`` where there are such operands: the dtypes
that lhs and rhs are converted from. ``GemmProblem`` says what follows from it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.typed import Params, iinfo
from tracea_jax.problem import GatedMatmulProblem, GemmProblem

Stored = tuple[str | None, str | None]  # of lhs and rhs
NONE: Stored = (None, None)


def as_stored(lhs: str | None, rhs: str | None) -> Params:
    """The primitives' parameter; nothing if nothing is converted."""
    return {} if lhs is rhs is None else {"stored": (lhs, rhs)}


def alone(params: Params, operand: int, *, first: bool) -> Params:
    """Parameters of a product of one of the operands and something else.

    Args:
      params: of the product that has the operand.
      operand: 0 for lhs, 1 for rhs.
      first: whether it is the lhs of the other product.
    """
    dtype = params.get("stored", NONE)[operand]
    rest = {name: value for name, value in params.items() if name != "stored"}
    return {**rest, **(as_stored(dtype, None) if first else as_stored(None, dtype))}


def params_of(problem: GemmProblem | GatedMatmulProblem) -> Params:
    """The primitives' parameter for a problem."""
    return as_stored(problem.lhs_stored, problem.rhs_stored)


def converted(
    problem: GemmProblem | GatedMatmulProblem, *inputs: jax.Array
) -> list[jax.Array]:
    """The primitive's operands: those of narrow integers as the program converts them.

    The first is of the lhs's dtype, and those of the rhs's follow.
    """
    lhs, *others = inputs
    if problem.lhs_stored:
        lhs = lhs.astype(problem.lhs)
    if problem.rhs_stored:
        weights = 2 if isinstance(problem, GatedMatmulProblem) else 1
        others[:weights] = [w.astype(problem.rhs) for w in others[:weights]]
    return [lhs, *others]


def as_integers(x: jax.Array, dtype: str | None) -> jax.Array:
    """Normal numbers over most of the dtype's range; as they are without a dtype."""
    if dtype is None:
        return x
    info = iinfo(dtype)
    whole = jnp.round(x.astype(jnp.float32) * spread(dtype))
    return jnp.clip(whole, info.min, info.max).astype(dtype)


def spread(dtype: str) -> float:
    """The standard deviation of such integers."""
    return iinfo(dtype).max / 4
