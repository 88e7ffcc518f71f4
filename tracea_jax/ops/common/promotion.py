"""Promotion of dtypes and ranks, also in programs that forbid it.

``jax_numpy_dtype_promotion="strict"`` and ``jax_numpy_rank_promotion="raise"`` find
what users mix by mistake; what the ops mix is meant. Callers: their references and
rules.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.typed import lax


def promoted(*dtypes: Any) -> jnp.dtype:
    """The dtype that all of these are promoted to."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, in x's dtype; either may have more dimensions in front."""
    rank = max(x.ndim, y.ndim)
    return of_rank(x, rank) + of_rank(y.astype(x.dtype), rank)


def of_rank(x: jax.Array, rank: int) -> jax.Array:
    """x with as many dimensions, the first ones of size 1."""
    return lax.broadcast_to_rank(x, rank)
