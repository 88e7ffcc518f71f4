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
from jax.dtypes import canonicalize_dtype

from tracea_jax.mistakes import shown
from tracea_jax.ops.common.typed import eval_shape, finfo, iinfo, lax

# Kinds in the order of promotion. Numbers of a kind are cut by those before it.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
_FLOATING, _COMPLEX = 2, 3  # of these
_FLOATS = ("float16", "bfloat16", "float32", "float64")  # the narrowest first


def preferred_dtype(preferred: Any) -> jnp.dtype | None:
    """``preferred_element_type=`` as a dtype that JAX has enabled, or None.

    Raises:
      TypeError: if it is no dtype.
    """
    if preferred is None:
        return None
    try:
        return canonicalize_dtype(preferred)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"preferred_element_type={shown(preferred)} must be a dtype of JAX or None"
        ) from e


def product_dtype(a: jax.Array, b: jax.Array, preferred: Any) -> jnp.dtype:
    """The dtype of ``jnp.matmul`` of operands with these dtypes.

    Raises:
      TypeError, ValueError: those of ``jnp.matmul``, on dtypes without a common one, or
        a preferred one that is too narrow; on a real one for complex operands.
    """
    if preferred is not None and _kind(preferred) < _COMPLEX:
        for x in (a, b):
            if _kind(x.dtype) == _COMPLEX:
                raise TypeError(
                    f"preferred_element_type={preferred} has no imaginary part; an "
                    f"operand is {x.dtype}"
                )
    one = [jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (a, b)]
    product = functools.partial(jnp.matmul, preferred_element_type=preferred)
    return eval_shape(product, *one).dtype


def convolution_dtype(x: jax.Array, w: jax.Array, preferred: Any) -> jnp.dtype:
    """The dtype of ``lax.conv_general_dilated`` of operands in their common dtype.

    Floating operands take any floating ``preferred``, where lax refuses a narrower one.

    Raises:
      TypeError, ValueError: on dtypes without a common one, or a preferred one that lax
        refuses for it.
    """
    if preferred is None:
        return jnp.promote_types(x.dtype, w.dtype)
    if all(jnp.issubdtype(d, jnp.floating) for d in (x.dtype, w.dtype, preferred)):
        return jnp.dtype(preferred)  # also a narrower one, to which the sum is rounded
    one = jax.ShapeDtypeStruct((1, 1, 1, 1), promoted(x.dtype, w.dtype))
    convolution = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        preferred_element_type=preferred,
    )
    return eval_shape(convolution, one, one).dtype


def check_kinds(out: jnp.dtype, **operands: jax.Array | None) -> None:
    """Refuses operands whose numbers the result would cut: floats in an integer.

    Raises:
      TypeError: naming the operand.
    """
    for name, x in operands.items():
        if x is not None and _kind(x.dtype) > _kind(out):
            raise TypeError(
                f"{name} is {x.dtype}, and the result {out}, which would cut it; pass "
                f"preferred_element_type={promoted(x.dtype, out)} or cast {name}"
            )


def promoted(*dtypes: Any) -> jnp.dtype:
    """The dtype that all of these are promoted to.

    JAX promotes no float of 8 bits or fewer together with another float, and no integer
    of 4 bits or fewer together with another number. These become the narrowest float,
    or integers of 8 bits, that hold the values of each.
    """
    known = [jnp.dtype(d) for d in dtypes]
    with jax.numpy_dtype_promotion("standard"):
        try:
            return functools.reduce(jnp.promote_types, known)
        except ValueError:
            return functools.reduce(jnp.promote_types, _widened(known))


def _widened(dtypes: list[jnp.dtype]) -> list[jnp.dtype]:
    """Dtypes that JAX promotes, which hold what these hold."""
    if max(map(_kind, dtypes)) < _FLOATING:
        return [_at_least_8_bits(d) for d in dtypes]
    inexact = [d for d in dtypes if _kind(d) >= _FLOATING]
    real = [d for d in inexact if jnp.issubdtype(d, jnp.floating)]
    held = [f for f in map(jnp.dtype, _FLOATS) if all(_holds(f, d) for d in real)]
    return [*(d for d in inexact if d not in real), held[0]]


def _at_least_8_bits(dtype: jnp.dtype) -> jnp.dtype:
    if not jnp.issubdtype(dtype, jnp.integer) or iinfo(dtype).bits >= 8:
        return dtype
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return jnp.dtype("int8" if is_signed else "uint8")


def _holds(wide: jnp.dtype, narrow: jnp.dtype) -> bool:
    """True if each finite number of the one floating dtype is one of the other."""
    w, n = finfo(wide), finfo(narrow)
    return (
        n.nmant <= w.nmant
        and n.maxexp <= w.maxexp
        and n.minexp - n.nmant >= w.minexp - w.nmant
    )


def _kind(dtype: jnp.dtype) -> int:
    return next(i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))


def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, in x's dtype; either may have more dimensions in front."""
    rank = max(x.ndim, y.ndim)
    return of_rank(x, rank) + of_rank(y.astype(x.dtype), rank)


def of_rank(x: jax.Array, rank: int) -> jax.Array:
    """x with as many dimensions, the first ones of size 1."""
    return lax.broadcast_to_rank(x, rank)
