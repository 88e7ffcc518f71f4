"""Softmax, however it is written."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_spellings.base import (
    CAUSAL,
    MASK,
    NARROW,
    TRIL,
    B,
    Case,
    H,
    T,
    bnth,
    case,
    scores,
    softmax,
)


def shifted(s: Any) -> jax.Array:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def unshifted(s: Any) -> jax.Array:
    e = jnp.exp(s)
    return e / e.sum(-1, keepdims=True)


def reciprocal(s: Any) -> jax.Array:
    e = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    return e * (1 / e.sum(-1, keepdims=True))


def safe(s: Any) -> jax.Array:
    largest = s.max(-1, keepdims=True)
    e = jnp.exp(s - jnp.where(jnp.isfinite(largest), largest, 0))
    return e / jnp.broadcast_to(jnp.sum(e, -1)[..., None], e.shape)


def in_float32(s: Any) -> jax.Array:
    return softmax(s.astype(jnp.float32), axis=-1).astype(s.dtype)


def with_softmax(f: Any, dtype: str) -> Case:
    def fn(q: Any, k: Any, v: Any) -> jax.Array:
        return f(q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(H).astype(q.dtype)) @ v

    return case(fn, *bnth(dtype=dtype))


def softmax_where(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
    return softmax(scores(q, k), where=mask) @ v


def zeroed(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
    p = softmax(jnp.where(mask, scores(q, k), -1e9))
    return jnp.where(mask, p, 0) @ v


def exponentials_masked(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
    e = jnp.exp(scores(q, k)) * mask
    return (e / e.sum(-1, keepdims=True)) @ v


EMPTY = jnp.asarray(MASK).at[:, :, 2].set(False)  # a query that sees nothing
SOFTMAX = {
    **{
        f"{f.__name__} {dtype}": with_softmax(f, dtype)
        for f in (softmax, shifted, unshifted, reciprocal, safe, in_float32)
        for dtype in ("float32", *NARROW)
    },
    "where": case(softmax_where, *bnth(), jnp.asarray(MASK), mask=(B, 1, T, T)),
    "where empty": case(softmax_where, *bnth(), EMPTY, mask=(B, 1, T, T)),
    "where causal": case(
        functools.partial(softmax_where, mask=TRIL), *bnth(), is_causal=True
    ),
    "zeroed": case(zeroed, *bnth(), EMPTY, mask=(B, 1, T, T)),
    "zeroed causal": case(functools.partial(zeroed, mask=TRIL), *bnth(), **CAUSAL),
    "multiplied": case(
        exponentials_masked, *bnth(), jnp.asarray(MASK), mask=(B, 1, T, T)
    ),
}
