"""Checks of the arrays of masks. Callers: the functions of ``masks``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def ids(name: str, x: Any) -> Any:
    """Segment ids as int32, (length,) or (batch, length)."""
    x = _array(x)
    is_small = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 4
    if isinstance(x, np.ndarray) and x.dtype == np.int64:  # numpy's own integers
        is_small = np.array_equal(x, x.astype(np.int32))
    if not is_small or x.ndim not in (1, 2):
        raise ValueError(
            f"{name} must be integers of up to 32 bits, of shape (length,) or (batch, "
            f"length), not {x.dtype} of shape {x.shape}"
        )
    return x.astype(np.int32)


def lengths(name: str, x: Any) -> Any:
    """Lengths as int32, () or (batch,)."""
    x = _array(x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim > 1:
        raise ValueError(
            f"{name} must be integers of shape () or (batch,), not {x.dtype} of shape "
            f"{x.shape}"
        )
    return x.astype(np.int32)


def array(name: str, x: Any) -> Any:
    """A boolean array of 1 to 4 dimensions."""
    x = _array(x)
    if x.dtype != bool or not 0 < x.ndim <= 4:
        raise ValueError(
            f"{name} must be boolean with 1 to 4 dimensions, not {x.dtype} of shape "
            f"{x.shape}"
        )
    return x


def rank_4(x: Any) -> Any:
    """The array as (batch, heads, queries, keys)."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _array(x: Any) -> Any:
    """As it is, if it is an array of JAX or numpy: a mask need not be on a device."""
    return x if hasattr(x, "ndim") and hasattr(x, "dtype") else np.asarray(x)
