"""Biases, masks of heads, soft caps, and values of another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numerics import normal

from attention_spellings.base import (
    COLUMN,
    ROW,
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
    column,
    row,
    scores,
    softmax,
)

# --- biases ---------------------------------------------------------------------------


def biased(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return softmax(scores(q, k) + bias) @ v


def biased_twice(q: Any, k: Any, v: Any, before: Any, after: Any) -> jax.Array:
    return softmax((q @ jnp.swapaxes(k, -1, -2) - before) * SCALE + after) @ v


def masked_bias(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
    bias = table[jnp.clip(ROW - COLUMN, 0, 3)].transpose(2, 0, 1)[None]
    bias = (bias + jnp.where(row() >= column(), 0, -1e9)).astype(jnp.float32)
    return softmax(scores(q, k) + bias) @ v


def bias_of_products(q: Any, k: Any, v: Any, r: Any) -> jax.Array:
    bias = jnp.einsum("bnth,sh->bnts", q, r)
    return softmax((q @ jnp.swapaxes(k, -1, -2) + bias) * SCALE) @ v


BIASES = {
    **{
        f"bias {len(shape)}": case(biased, *bnth(), normal(*shape), bias=whole)
        for shape, whole in (
            ((T, T), (1, 1, T, T)),
            ((N, T, T), (1, N, T, T)),
            ((B, 1, 1, T), (B, 1, 1, T)),
        )
    },
    "twice": case(
        biased_twice,
        *bnth(),
        normal(N, T, T),
        normal(B, 1, 1, T),
        bias=(B, N, T, T),
    ),
    "masked": case(
        masked_bias, *bnth(), normal(4, N), is_causal=True, bias=(1, N, T, T)
    ),
    "products": case(bias_of_products, *bnth(), normal(T, H), bias=(B, N, T, T)),
}

# --- masks of heads -------------------------------------------------------------------


def with_head_mask(mask: Callable[[], Any], whole: bool = True) -> Any:
    """Attention whose probabilities are multiplied with a mask of layers and heads."""

    def fn(q: Any, k: Any, v: Any) -> jax.Array:
        p, own = softmax(scores(q, k)), mask()[1]
        if whole:
            p = jnp.einsum("...hqk,h->...hqk", p, own)
        else:
            p = p * own[:, None, None]
        return p @ v

    return fn


_LAYERS = (3, N)
ONES = jnp.ones(_LAYERS)
HEAD_MASKS = {
    f"{name}, {'einsum' if whole else 'times'}": case(
        with_head_mask(mask, whole), *bnth(dtype=dtype)
    )
    for name, mask, dtype in [
        ("floats", lambda: ONES, "float32"),
        ("integers", lambda: jnp.array(ONES, dtype="i4"), "float32"),
        ("made inside", lambda: jnp.ones(_LAYERS).astype("int8"), "float32"),
        ("booleans", lambda: ONES > 0, "float32"),
        ("bfloat16", lambda: jnp.array(ONES, dtype="i4"), "bfloat16"),
    ]
    for whole in (False, True)
}

# --- soft caps, and values of another size --------------------------------------------


def capped(q: Any, k: Any, v: Any) -> jax.Array:
    s = jnp.tanh(scores(q, k) / 2.0) * 2.0
    return softmax(jnp.where(TRIL, s, -1e9)) @ v


def capped_with_bias(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    s = 3.0 * jnp.tanh((1 / 3) * (bias + scores(q, k)))
    return softmax(s + jnp.where(TRIL, 0, -jnp.inf)) @ v


def capped_as_gemma(q: Any, k: Any, v: Any) -> jax.Array:
    q = q.reshape(B, T, K, N // K, H) * SCALE
    s = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(B, T, N, T)
    s = jnp.tanh(s / 4) * 4
    s = jnp.where(jnp.asarray(TRIL)[None, :, None], s, -2.3819763e38)
    p = softmax(s).astype(k.dtype).reshape(B, T, K, N // K, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, T, N, H)


def narrow_values(q: Any, k: Any, v: Any) -> jax.Array:
    return softmax(scores(q, k)) @ v[..., :3]


CAPPED = {
    "capped": case(capped, *bnth(), is_causal=True),
    "capped bfloat16": case(capped, *bnth(dtype="bfloat16"), is_causal=True),
    "capped with a bias": case(
        capped_with_bias, *bnth(), normal(N, T, T), is_causal=True, bias=(1, N, T, T)
    ),
    "as gemma": case(capped_as_gemma, *btnh(K), is_causal=True),
    "narrow values": case(narrow_values, *bnth(), v=(B, T, N, 3)),
}
