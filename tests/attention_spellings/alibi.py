"""ALiBi, which the op makes of slopes, and biases of positions that it reads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import normal

from attention_spellings.base import (
    CAUSAL,
    COLUMN,
    ROW,
    SCALE,
    TRIL,
    B,
    Case,
    H,
    K,
    N,
    T,
    bnth,
    btnh,
    case,
    column,
    row,
    scores,
    softmax,
)

SLOPES = jnp.asarray(2.0 ** -np.arange(1, N + 1), jnp.float32)
LINEAR = {"alibi": "linear", "alibi_slopes": (N,)}
DISTANCE = {"alibi": "distance", "alibi_slopes": (N,)}


def biased_by(made: Any, masked: bool, dtype: str = "float32", **expected: Any) -> Case:
    def fn(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
        s = scores(q, k) + made(slopes[:, None, None])
        s = jnp.where(TRIL, s, -1e9) if masked else s
        return softmax(s).astype(v.dtype) @ v

    args = (*bnth(dtype=dtype), SLOPES)
    return case(fn, *args, is_causal=masked, **expected)


def geometric() -> jax.Array:
    """Slopes as programs compute them."""
    return jnp.power(2.0, -8 / N * jnp.arange(1, N + 1, dtype=jnp.float32))


def bloom(q: Any, k: Any, v: Any) -> jax.Array:
    """Keys alone, slopes made inside, a mask that is added."""
    alibi = geometric()[None, :, None, None] * jnp.arange(T, dtype=jnp.float32)
    bias = alibi + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -1e9)
    return softmax(scores(q, k) + bias) @ v


def mpt(q: Any, k: Any, v: Any) -> jax.Array:
    """Keys counted from the last one back, after the scale."""
    keys = jnp.arange(1 - T, 1, dtype=jnp.int32).reshape(1, 1, 1, T)
    s = (q @ jnp.swapaxes(k, -1, -2)) * SCALE + keys * geometric().reshape(1, N, 1, 1)
    return softmax(jnp.where(TRIL, s, jnp.finfo(s.dtype).min)) @ v


def in_groups(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
    s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k)
    slopes = slopes.reshape(K, N // K, 1, 1)
    s = (s - slopes * jnp.abs(row() - column())) * SCALE
    o = jnp.einsum("bkgts,bskh->btkgh", softmax(jnp.where(TRIL, s, -1e9)), v)
    return o.reshape(B, T, N, H)


def decoding(q: Any, k: Any, v: Any, slopes: Any, index: Any) -> jax.Array:
    """The distance of a query at a position that is known at run time only."""
    s = jnp.einsum("bnh,bsnh->bns", q[:, 0], k) * SCALE
    keys = jnp.arange(T)
    s = s - slopes[:, None] * jnp.abs(index - keys).astype(jnp.float32)
    return jnp.einsum("bns,bsnh->bnh", softmax(jnp.where(keys <= index, s, -1e9)), v)


def with_another_bias(q: Any, k: Any, v: Any, slopes: Any, bias: Any) -> jax.Array:
    s = scores(q, k) + bias
    return softmax(s - slopes[:, None, None] * jnp.abs(ROW - COLUMN)) @ v


def capped(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
    s = scores(q, k) + slopes[:, None, None] * (column() - row())
    return softmax(jnp.where(TRIL, 2 * jnp.tanh(s / 2), -1e9)) @ v


ALIBI = {
    "ahead": biased_by(lambda m: m * (column() - row()), True, **LINEAR),
    "behind": biased_by(lambda m: -(m * (row() - column())), True, **LINEAR),
    "no mask": biased_by(lambda m: m * (column() - row()), False, **LINEAR),
    "distance": biased_by(lambda m: -jnp.abs(row() - column()) * m, False, **DISTANCE),
    "growing": biased_by(lambda m: jnp.abs(ROW - COLUMN) * m / 2, False, **DISTANCE),
    "masked distance": biased_by(
        lambda m: m * -jnp.abs(row() - column()).astype(jnp.float32), True, **LINEAR
    ),
    "keys": biased_by(lambda m: m * jnp.arange(T), True, **LINEAR),
    "bfloat16": biased_by(
        lambda m: m * (column() - row()), True, dtype="bfloat16", **LINEAR
    ),
    "bloom": case(bloom, *bnth(), **CAUSAL, **LINEAR),
    "mpt": case(mpt, *bnth(), **CAUSAL, **LINEAR),
    "in groups": case(in_groups, *btnh(K), SLOPES, **CAUSAL, **LINEAR),
    "decoding": case(
        decoding,
        *btnh(),
        SLOPES,
        jnp.int32(3),
        q=(B, 1, N, H),
        kv_lengths=(B,),
        **LINEAR,
    ),
    "with another bias": case(
        with_another_bias,
        *bnth(),
        SLOPES,
        normal(1, 1, T, T),
        bias=(1, 1, T, T),
        **DISTANCE,
    ),
    "capped": case(capped, *bnth(), SLOPES, **CAUSAL, **LINEAR),
}


def _rounded(m: Any) -> jax.Array:
    return (m * (column() - row())).astype("bfloat16").astype("float32")


# Other functions of positions: they stay biases.
NO_ALIBI = {
    "rounded": biased_by(_rounded, True, bias=(1, N, T, T)),
    "in bfloat16": biased_by(
        lambda m: m.astype("bfloat16") * (column() - row()).astype("bfloat16"),
        True,
        dtype="bfloat16",
        bias=(1, N, T, T),
    ),
    "squared": biased_by(
        lambda m: m * (column() - row()) ** 2, True, bias=(1, N, T, T)
    ),
    "twice as far": biased_by(
        lambda m: m * (2 * column() - row()), True, bias=(1, N, T, T)
    ),
    "from elsewhere": biased_by(
        lambda m: m * jnp.abs(column() - row() + 1), False, bias=(1, N, T, T)
    ),
    "no slopes": biased_by(
        lambda m: m[0] * jnp.arange(T)[:, None] * jnp.arange(T), True, bias=(1, 1, T, T)
    ),
    "buckets": biased_by(
        lambda m: m * jnp.minimum(row() - column(), 3), True, bias=(1, N, T, T)
    ),
}


def capped_keys(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
    """A cap tells how large scores are: what all keys share counts."""
    s = scores(q, k) + slopes[:, None, None] * jnp.arange(T)
    return softmax(jnp.where(TRIL, 2 * jnp.tanh(s / 2), -1e9)) @ v


NO_ALIBI["capped keys"] = case(
    functools.partial(capped_keys), *bnth(), SLOPES, bias=(1, N, 1, T), **CAUSAL
)
