"""Softmaxes over one logit more, and softmaxes that are divided at the end."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import normal

from attention_spellings.base import (
    CAUSAL,
    LEFT,
    MASK,
    SCALE,
    TRIL,
    B,
    H,
    K,
    N,
    T,
    bnth,
    btnh,
    case,
    scores,
    softmax,
)

SINKS = normal(N, seed=5)
OF_HEADS = {"sinks": (N,)}


def causal(q: Any, k: Any) -> jax.Array:
    return jnp.where(TRIL, scores(q, k), jnp.finfo(q.dtype).min)


# --- put together with the scores -----------------------------------------------------


def gpt_oss(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k) * SCALE
    mask = jnp.triu(jnp.full((T, T), -jnp.inf), 1)
    mask = mask + jnp.tril(jnp.full((T, T), -jnp.inf), -3)
    sinks = jnp.broadcast_to(sinks.reshape(1, K, N // K, 1, 1), (B, K, N // K, T, 1))
    p = softmax(jnp.concatenate([s + mask, sinks.astype(s.dtype)], -1))[..., :-1]
    return jnp.einsum("bkgts,bskh->btkgh", p.astype(v.dtype), v).reshape(B, T, N, H)


def as_hugging_face(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    sinks = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    s = jnp.concatenate([causal(q, k), sinks], -1)
    s = s - s.max(-1, keepdims=True)
    return softmax(s.astype(jnp.float32))[..., :-1].astype(v.dtype) @ v


def sink_first(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    sinks = jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1))
    return softmax(jnp.concatenate([sinks, causal(q, k)], -1))[..., 1:] @ v


def without_batch(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    """(heads, queries, keys)"""
    s = jnp.concatenate([scores(q, k), jnp.broadcast_to(sinks, (N, T, 1))], -1)
    return softmax(s)[:, :, :T] @ v


def decoding(q: Any, k: Any, v: Any, sinks: Any, length: Any) -> jax.Array:
    """One query for the heads that share keys: nothing but the sinks tells heads."""
    s = jnp.einsum("bkgh,bskh->bkgs", q[:, 0].reshape(B, K, N // K, H), k) * SCALE
    s = jnp.where(jnp.arange(T) < length[:, None, None, None], s, -1e9)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks.reshape(K, -1, 1), (B, K, 2, 1))], 3)
    return jnp.einsum("bkgs,bskh->bkgh", softmax(s)[..., :-1], v).reshape(B, N, H)


# --- a summand of its own -------------------------------------------------------------


def by_hand(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    s, sinks = causal(q, k).astype(jnp.float32), sinks[:, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), sinks))
    e = jnp.exp(s - top)
    return (e / (e.sum(-1, keepdims=True) + jnp.exp(sinks - top))).astype(v.dtype) @ v


def shifted_by_scores(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    s = causal(q, k)
    top = s.max(-1)
    e = jnp.exp(s - top[..., None])
    total = jnp.exp(sinks[None, :, None] - top) + e.sum(-1)
    return (e * (1 / total)[..., None]) @ v


def unshifted(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    e = jnp.exp(scores(q, k)) * MASK
    return (e / (e.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None])) @ v


def softmax_plus_one(shift: bool, q: Any, k: Any, v: Any) -> jax.Array:
    s = causal(q, k)
    if not shift:
        e = jnp.exp(s)
        return (e / (1 + e.sum(-1, keepdims=True))) @ v
    top = jnp.maximum(s.max(-1, keepdims=True), 0)
    e = jnp.exp(s - top)
    return (e / (e.sum(-1, keepdims=True) + jnp.exp(-top))) @ v


# --- divided after the product --------------------------------------------------------


def divided_late(q: Any, k: Any, v: Any) -> jax.Array:
    s = causal(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return (e.astype(v.dtype) @ v) / e.sum(-1, keepdims=True)


def multiplied_late(q: Any, k: Any, v: Any) -> jax.Array:
    e = jnp.exp(scores(q, k)) * TRIL
    o = jnp.einsum("bnts,bnsh->btnh", e, v)
    return o * (1 / e.sum(-1)).swapaxes(1, 2)[..., None]


def maxtext(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
    """With a maximum that is computed for others, too, which need it or not."""
    q = q.reshape(B, T, K, N // K, H) * SCALE
    s = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32)
    s = s + jnp.where(TRIL[None, None, None], 0.0, -0.7 * float(np.finfo("f4").max))
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(1, K, -1, 1, 1), (B, K, N // K, T, 1))
        s = jnp.concatenate([s, sinks], -1)
    top = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - top)
    total = jnp.sum(e, -1, keepdims=True)
    top, total = (jnp.moveaxis(x, -2, 1).reshape(B, T, N, 1) for x in (top, total))
    o = jnp.einsum("bkgts,bskd->btkgd", e[..., :T].astype(v.dtype), v)
    return o.reshape(B, T, N, H) / total.astype(v.dtype)


_NARROW = (*btnh(K, dtype="bfloat16"), SINKS.astype("bfloat16"))
WITH_SINKS = {
    "gpt-oss": case(gpt_oss, *btnh(K), SINKS, **LEFT, **OF_HEADS),
    "gpt-oss in bfloat16": case(gpt_oss, *_NARROW, **LEFT, **OF_HEADS),
    "hugging face": case(as_hugging_face, *bnth(), SINKS, **CAUSAL, **OF_HEADS),
    "first": case(sink_first, *bnth(), SINKS, **CAUSAL, **OF_HEADS),
    "no batch": case(
        without_batch,
        *(x[0] for x in bnth()),
        SINKS[:, None, None],
        q=(1, T, N, H),
        **OF_HEADS,
    ),
    "decoding": case(
        decoding,
        *btnh(K),
        SINKS,
        jnp.asarray([2, T]),
        q=(B, 1, N, H),
        kv_lengths=(B,),
        **OF_HEADS,
    ),
    "by hand": case(by_hand, *bnth(), SINKS, **CAUSAL, **OF_HEADS),
    "by hand in bfloat16": case(
        by_hand, *bnth(dtype="bfloat16"), SINKS, **CAUSAL, **OF_HEADS
    ),
    "shifted by scores": case(shifted_by_scores, *bnth(), SINKS, **CAUSAL, **OF_HEADS),
    "unshifted": case(unshifted, *bnth(), SINKS, mask=(B, 1, T, T), **OF_HEADS),
    **{
        f"plus one {shift}": case(
            functools.partial(softmax_plus_one, shift), *bnth(), **CAUSAL, **OF_HEADS
        )
        for shift in (False, True)
    },
    "maxtext": case(maxtext, *btnh(K), SINKS, **CAUSAL, **OF_HEADS),
}
DIVIDED_LATE = {
    "divided": case(divided_late, *bnth(), **CAUSAL),
    "divided in bfloat16": case(divided_late, *bnth(dtype="bfloat16"), **CAUSAL),
    "multiplied": case(multiplied_late, *bnth(), **CAUSAL),
    "maxtext": case(maxtext, *btnh(K), k=(B, T, K, H), **CAUSAL),
}
