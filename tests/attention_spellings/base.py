"""A spelling with the call that it must become, and what many spellings share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import normal

B, T, N, K, H = 2, 6, 4, 2, 8
SCALE = 1 / math.sqrt(H)
NARROW = ("bfloat16", "float16")
ROW, COLUMN = np.arange(T)[:, None], np.arange(T)[None, :]
TRIL = ROW >= COLUMN
LENGTHS = np.array([3, T], np.int32)
MASK = np.asarray(normal(B, 1, T, T) > 0) | np.eye(T, dtype=bool)
softmax = jax.nn.softmax
CAUSAL = {"is_causal": True}
LEFT = {"is_causal": True, "window": (2, 0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and the one call that it becomes.

    Attributes:
      fn, args: the program.
      scale, is_causal, window, aligned_at_end, alibi: parameters of the call.
      shapes: of the operands beside q, k, v, all of them; of these, if given.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    scale: float = SCALE
    is_causal: bool = False
    window: tuple[int, int] | None = None
    aligned_at_end: bool = False
    alibi: str | None = None
    shapes: dict[str, tuple[int, ...]]


def case(fn: Any, *args: Any, **expected: Any) -> Case:
    names = ("scale", "is_causal", "window", "aligned_at_end", "alibi")
    fields = {k: expected.pop(k) for k in names if k in expected}
    return Case(fn=fn, args=args, **fields, shapes=expected)


def btnh(kv: int = N, s: int = T, dtype: Any = "float32") -> tuple[jax.Array, ...]:
    """query, key and value, (batch, length, heads, width)."""
    shapes = (B, T, N, H), (B, s, kv, H), (B, s, kv, H)
    return tuple(normal(*x, dtype=dtype, seed=i) for i, x in enumerate(shapes))


def bnth(kv: int = N, s: int = T, dtype: Any = "float32") -> tuple[jax.Array, ...]:
    return tuple(x.swapaxes(1, 2) for x in btnh(kv, s, dtype))


def scores(q: Any, k: Any) -> jax.Array:
    return q @ jnp.swapaxes(k, -1, -2) * jnp.asarray(SCALE, q.dtype)


def ones() -> jax.Array:
    return jnp.ones((T, T))


def row() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (T, T), 0)


def column() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (T, T), 1)
