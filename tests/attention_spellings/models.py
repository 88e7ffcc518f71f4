"""Attention as well-known models and libraries write it, their caches included."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from numerics import normal

from attention_spellings.base import (
    CAUSAL,
    LEFT,
    SCALE,
    B,
    H,
    K,
    N,
    T,
    btnh,
    case,
    column,
    row,
    softmax,
)

S = 10  # keys of a cache
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
PADDING = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
AT = jnp.asarray([3, 7])  # positions that are decoded
LOWEST = -0.7 * float(np.finfo(np.float32).max)


def in_groups(q: Any) -> Any:
    return q.reshape(*q.shape[:2], K, N // K, H)


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


# --- training -------------------------------------------------------------------------


def maxtext(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    """A mask that becomes numbers, of which a mask is made; divided at the end."""
    same = (ids[:, :, None] == ids[:, None, :])[:, None, None]
    seen = jnp.logical_and(same, (column() <= row())[None, None, None])
    mask = jnp.where(seen, 0.0, LOWEST)
    s = jnp.einsum("btkgd,bskd->bkgts", in_groups(q), k)
    s = jnp.where(mask >= LOWEST * 0.5, s, LOWEST)
    top = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - top)
    total = jnp.moveaxis(jnp.sum(e, -1, keepdims=True), -2, 1).reshape(B, T, N, 1)
    return jnp.einsum("bkgts,bskd->btkgd", e, v).reshape(B, T, N, H) / total


def gemma(mask: Any, cap: float | None, q: Any, k: Any, v: Any) -> jax.Array:
    """Queries and keys are normalised; heads and groups are one dimension."""
    q, k = norm(q) * SCALE, norm(k)
    s = jnp.einsum("BTKGH,BSKH->BTKGS", in_groups(q), k).reshape(B, T, N, T)
    s = s if cap is None else jnp.tanh(s / cap) * cap
    s = jnp.where(jnp.expand_dims(mask, -2), s, -2.3819763e38)
    p = softmax(s).astype(k.dtype).reshape(B, T, K, N // K, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, T, N, H)


def gemma_by_positions(q: Any, k: Any, v: Any, at: Any) -> jax.Array:
    keys, queries = at[:, None, :], at[:, :, None]
    return gemma((keys <= queries) & (keys > queries - 3), None, q, k, v)


def gemma_local(q: Any, k: Any, v: Any) -> jax.Array:
    everything = jnp.ones((T, T), bool)
    sliding = jnp.triu(everything, -2) * jnp.tril(everything, 2)
    return gemma((jnp.tril(everything) * sliding)[None], 50.0, q, k, v)


def by_flax(q: Any, k: Any, v: Any, **how: Any) -> jax.Array:
    weights = nn.dot_product_attention_weights(q, k, dtype=jnp.float32, **how)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def as_bias(mask: Any) -> jax.Array:
    whole = jnp.full(mask.shape, jnp.finfo(jnp.float32).min)
    return jax.lax.select(mask > 0, jnp.zeros(mask.shape), whole)


def llama(q: Any, k: Any, v: Any, padding: Any) -> jax.Array:
    causal = nn.make_causal_mask(jnp.ones((1, T), bool), dtype=bool)
    causal = jnp.broadcast_to(causal, (B, *causal.shape[1:]))
    mask = nn.combine_masks(padding[:, None, None, :], causal)
    k, v = (jnp.repeat(x, N // K, 2) for x in (k, v))
    return by_flax(q, k, v, bias=as_bias(mask))


def t5(q: Any, k: Any, v: Any, table: Any, padding: Any) -> jax.Array:
    """Scores that are not scaled, and a bias of buckets of distances."""
    distance = jnp.maximum(row() - column(), 0)
    far = 4 + (jnp.log(distance.astype("float32") / 4 + 1e-6) * 2.885).astype("int32")
    bucket = jnp.where(distance < 4, distance, jnp.minimum(far, 7))
    causal = nn.make_causal_mask(jnp.ones((B, T)))
    mask = nn.combine_masks(causal, padding[:, None, None, :])
    bias = table[bucket].transpose(2, 0, 1)[None] + as_bias(mask)
    return by_flax(q * math.sqrt(H), k, v, bias=bias)


def bloom(q: Any, k: Any, v: Any, padding: Any) -> jax.Array:
    """Positions that padding tells: a bias of keys."""
    slopes = jnp.asarray(2.0 ** -np.arange(1, N + 1))[None, :, None, None]
    at = (padding.cumsum(-1) * padding)[:, None, None, :]
    causal = nn.make_causal_mask(jnp.ones((B, T)))
    mask = nn.combine_masks(causal, padding[:, None, None, :])
    return by_flax(q, k, v, bias=as_bias(mask) + slopes * at)


def deepseek(q: Any, k: Any, v: Any) -> jax.Array:
    """Part of each key is that of all heads; values are narrower."""
    shared = jnp.broadcast_to(k[:, :, :1, H:], (B, T, N, H // 2))
    k = jnp.concatenate([k[..., :H], shared], -1)
    s = jnp.einsum("bthd,bshd->bhts", q, k) * SCALE
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, jnp.finfo(s.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", softmax(s), v)


# --- decoding -------------------------------------------------------------------------


def updated(q: Any, k: Any, v: Any, k1: Any, v1: Any, index: Any) -> jax.Array:
    """One position of the cache (batch, length, heads, width) is written, then read."""
    k = jax.lax.dynamic_update_slice(k, k1, (0, index, 0, 0))
    v = jax.lax.dynamic_update_slice(v, v1, (0, index, 0, 0))
    s = jnp.einsum("btkgh,bskh->bkgts", in_groups(q), k) * SCALE
    s = jnp.where(jnp.arange(S) <= index, s, jnp.finfo(s.dtype).min)
    return jnp.einsum("bkgts,bskh->btkgh", softmax(s), v).reshape(B, 1, N, H)


def updated_each(q: Any, k: Any, v: Any, k1: Any, v1: Any, at: Any) -> jax.Array:
    """As ``updated``, of each example its own, in (batch, heads, length, width)."""

    @jax.vmap
    def update(cache: Any, new: Any, index: Any) -> Any:
        return jax.lax.dynamic_update_slice(cache, new, (0, index, 0))

    k, v = (update(x, new.swapaxes(1, 2), at) for x, new in ((k, k1), (v, v1)))
    s = jnp.einsum("btkgh,bksh->bkgts", in_groups(q), k) / math.sqrt(H)
    s = jnp.where(jnp.arange(S) <= at[:, None, None, None, None], s, -jnp.inf)
    return jnp.einsum("bkgts,bksh->btkgh", softmax(s), v).reshape(B, 1, N * H)


def rolling(q: Any, k: Any, v: Any, k1: Any, v1: Any, at: Any) -> jax.Array:
    """The cache is a window: what is written replaces the oldest."""
    examples = jnp.arange(B)
    k, v = (x.at[examples, at % S].set(y[:, 0]) for x, y in ((k, k1), (v, v1)))
    valid = (jnp.arange(S) <= at[:, None]) | (at[:, None] >= S)
    k, v = (jnp.repeat(x, N // K, 2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * SCALE
    s = jnp.where(valid[:, None, None], s, -1e30)
    return jnp.einsum("bhts,bshd->bthd", softmax(s), v)


ONE = normal(B, 1, N, H)
CACHE = btnh(K, S)[1:]
NEW = tuple(normal(B, 1, K, H, seed=i) for i in (3, 4))
PACKED = {"q_segments": (B, T), "kv_segments": (B, T)}
PADDED = {"mask": (B, 1, 1, T), **CAUSAL}
_GROUPED = {"q": (B, T, N, H), "k": (B, T, K, H)}
_DECODED = {"q": (B, 1, N, H), "k": (B, S, K, H)}
_TURNED = tuple(x.swapaxes(1, 2) for x in CACHE)
MODELS = {
    "maxtext": case(maxtext, *btnh(K), SEGMENTS, scale=1, **CAUSAL, **PACKED),
    "gemma by positions": case(
        gemma_by_positions,
        *btnh(K),
        jnp.arange(T) + AT[:, None],
        mask=(B, 1, T, T),
        **_GROUPED,
    ),
    "llama": case(llama, *btnh(K), PADDING, **PADDED, **_GROUPED),
    "t5": case(
        t5, *btnh(), normal(8, N), PADDING, scale=1, bias=(1, N, T, T), **PADDED
    ),
    "bloom": case(bloom, *btnh(), PADDING, bias=(B, N, 1, T), **PADDED),
    "whisper": case(by_flax, btnh()[0], *btnh(s=S)[1:], k=(B, S, N, H)),
    "updated": case(
        updated, ONE, *CACHE, *NEW, jnp.int32(4), kv_lengths=(B,), **_DECODED
    ),
    "updated each": case(
        updated_each, ONE, *_TURNED, *NEW, AT, kv_lengths=(B,), **_DECODED
    ),
    "rolling": case(rolling, ONE, *CACHE, *NEW, AT, mask=(B, 1, 1, S), **_DECODED),
}
RARE_MODELS = {
    "gemma local": case(gemma_local, *btnh(K), **LEFT, **_GROUPED),
    "deepseek": case(
        deepseek,
        normal(B, T, N, 12),
        normal(B, T, N, 12, seed=1),
        normal(B, T, N, H, seed=2),
        v=(B, T, N, H),
        **CAUSAL,
    ),
}
