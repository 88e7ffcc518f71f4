"""Masks by positions, lengths and arrays, and segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_spellings.base import (
    CAUSAL,
    COLUMN,
    LEFT,
    LENGTHS,
    MASK,
    NARROW,
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
    ones,
    row,
    scores,
    softmax,
)

# --- masks ----------------------------------------------------------------------------


def lengths() -> jax.Array:
    return jnp.asarray(LENGTHS)[:, None, None, None]


def flax_causal(batch: int = B) -> jax.Array:
    return nn.make_causal_mask(jnp.ones((batch, T)))


_SPELLED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "tril": (lambda s: jnp.where(jnp.tril(ones()) > 0, s, -1e9), CAUSAL),
    "tril of booleans": (
        lambda s: jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf),
        CAUSAL,
    ),
    "tril == 0": (lambda s: jnp.where(jnp.tril(ones()) == 0, -jnp.inf, s), CAUSAL),
    "captured": (lambda s: jnp.where(TRIL, s, jnp.finfo(s.dtype).min), CAUSAL),
    "captured numbers": (
        lambda s: jnp.where(jnp.asarray(1.0 * TRIL)[None, None] > 0.5, s, -1e9),
        CAUSAL,
    ),
    "row >= column": (lambda s: jnp.where(row() >= column(), s, -1e4), CAUSAL),
    "column > row": (lambda s: jnp.where(column() > row(), -1e9, s), CAUSAL),
    "arange": (
        lambda s: jnp.where(jnp.arange(T)[None] < jnp.arange(T)[:, None] + 1, s, -1e9),
        CAUSAL,
    ),
    "captured aranges": (
        lambda s: jnp.where(jnp.asarray(ROW) - jnp.asarray(COLUMN) >= 0, s, -1e9),
        CAUSAL,
    ),
    "floats": (
        lambda s: jnp.where(jnp.arange(T) - jnp.arange(T)[:, None] < 0.5, s, -1e9),
        CAUSAL,
    ),
    "flax": (lambda s: jnp.where(flax_causal(), s, -1e9), CAUSAL),
    "flax combined": (
        lambda s: jnp.where(flax_combined(), s, -1e9),
        CAUSAL,
    ),
    "added triu": (lambda s: s + jnp.triu(jnp.full((T, T), -1e9), 1), CAUSAL),
    "added where": (lambda s: s + jnp.where(jnp.tril(ones()), 0, -1e9), CAUSAL),
    "added captured": (lambda s: s + jnp.where(TRIL, 0, -np.inf), CAUSAL),
    "subtracted": (lambda s: s - 1e9 * (1 - jnp.tril(ones())), CAUSAL),
    "multiplied and subtracted": (
        lambda s: s * jnp.tril(ones()) - 1e10 * (1 - jnp.tril(ones())),
        CAUSAL,
    ),
    "mistral": (
        lambda s: jnp.where((column() <= row()) & (column() > row() - 3), s, -1e9),
        LEFT,
    ),
    "product of masks": (
        lambda s: jnp.where(jnp.tril(ones()) * jnp.triu(ones(), -2) > 0, s, -1e9),
        LEFT,
    ),
    "neither nor": (
        lambda s: jnp.where(~((ROW < COLUMN) | (row() - column() > 2)), s, -1e9),
        LEFT,
    ),
    "captured band": (lambda s: jnp.where(TRIL & (ROW - COLUMN <= 2), s, -1e9), LEFT),
    "distance": (
        lambda s: jnp.where(jnp.abs(row() - column()) <= 2, s, -1e9),
        {"window": (2, 2)},
    ),
    "twice": (
        lambda s: jnp.where(row() - column() < 3, jnp.where(TRIL, s, -1e9), -jnp.inf),
        LEFT,
    ),
    "diagonal": (
        lambda s: jnp.where(row() == column(), s, -1e9),
        {"is_causal": True, "window": (0, 0)},
    ),
    "everything": (lambda s: jnp.where(row() + T > column(), s, -1e9), {}),
    "all but itself": (
        lambda s: jnp.where(row() != column(), s, -1e9),
        {"mask": (1, 1, T, T)},
    ),
    "before, or first": (
        lambda s: jnp.where((column() < row()) | (column() == 0), s, -1e9),
        {"mask": (1, 1, T, T)},
    ),
    "blocks": (
        lambda s: jnp.where(row() // 2 == column() // 2, s, -1e9),
        {"mask": (1, 1, T, T)},
    ),
    "first keys": (
        lambda s: jnp.where(jnp.arange(T) < 4, s, -1e9),
        {"mask": (1, 1, 1, T)},
    ),
    "captured mask": (lambda s: jnp.where(MASK, s, -1e9), {"mask": (B, 1, T, T)}),
    "lengths": (
        lambda s: jnp.where(jnp.arange(T) < lengths(), s, -1e9),
        {"kv_lengths": (B,)},
    ),
    "lengths, causal": (
        lambda s: jnp.where(TRIL & (jnp.arange(T) <= lengths() - 1), s, -1e9),
        {"kv_lengths": (B,), "is_causal": True},
    ),
    "rows": (
        lambda s: jnp.where(jnp.arange(T)[:, None] < lengths(), s, -1e9),
        {"mask": (B, 1, T, 1)},
    ),
}


def flax_combined() -> jax.Array:
    mask = nn.combine_masks(flax_causal(), flax_causal(1))
    assert mask is not None
    return mask


def masked_by(spelled: Any, dtype: str = "float32", **expected: Any) -> Case:
    def fn(q: Any, k: Any, v: Any) -> jax.Array:
        return softmax(spelled(scores(q, k)).astype(q.dtype)) @ v

    return case(fn, *bnth(dtype=dtype), **expected)


def two_masks(s: Any) -> Any:
    s = jnp.where(jnp.tril(ones()) > 0, s, jnp.finfo(s.dtype).min)
    return s + jnp.where(row() - column() < 3, 0, -1e4).astype(s.dtype)


def masks_as_arguments(
    q: Any, k: Any, v: Any, causal: Any, padding: Any, lengths: Any, segments: Any
) -> jax.Array:
    same = segments[:, :, None] == segments[:, None, :]
    own = jnp.arange(T) < lengths[:, None, None, None]
    mask = causal & ~padding[:, None, None, :] & same[:, None] & own & TRIL
    return softmax(jnp.where(mask, scores(q, k), -1e9)) @ v


def decoding(q: Any, k: Any, v: Any, index: Any) -> jax.Array:
    s = jnp.einsum("bnh,bsnh->bns", q[:, 0], k) * SCALE
    p = softmax(jnp.where(jnp.arange(T) <= index, s, -1e9))
    return jnp.einsum("bns,bsnh->bnh", p, v)


def decoding_by(row: Any, q: Any, k: Any, v: Any, index: Any) -> jax.Array:
    """The mask is a row of a larger one."""
    s = jnp.einsum("bnh,bsnh->bns", q[:, 0], k) * SCALE
    p = softmax(jnp.where(row(index), s, -1e9))
    return jnp.einsum("bns,bsnh->bnh", p, v)


def sliced(index: Any) -> jax.Array:
    return jax.lax.dynamic_slice(jnp.asarray(TRIL), (index, 0), (1, T))


def sliced_of_computed(index: Any) -> jax.Array:
    """The slice of 4 rows starts no later than row 0, whatever is asked."""
    return jax.lax.dynamic_slice_in_dim(jnp.tril(jnp.ones((4, T), bool)), index, 1)


def indexed(index: Any) -> jax.Array:
    return jnp.asarray(TRIL)[jnp.array([1, 4]) * 0 + index][:, None]


def decoding_several(q: Any, k: Any, v: Any, index: Any) -> jax.Array:
    s = jnp.einsum("btnh,bsnh->bnts", q[:, :2], k) * SCALE
    seen = jnp.arange(T) <= index + jnp.arange(2)[:, None]
    return jnp.einsum("bnts,bsnh->btnh", softmax(jnp.where(seen, s, -1e9)), v)


def decoding_in_window(q: Any, k: Any, v: Any, index: Any) -> jax.Array:
    """One query of heads that share keys, each sequence at its own position."""
    here, keys = index[:, None], jnp.arange(T)
    seen = (keys <= here) & (keys > here - 3)
    return jax.nn.dot_product_attention(q[:, :1], k, v, mask=seen[:, None, None])


def chunk_in_window(q: Any, k: Any, v: Any, index: Any) -> jax.Array:
    here, keys = index + jnp.arange(T)[:, None], jnp.arange(T)
    seen = (keys <= here) & (here - keys <= 1) & (keys < index + T)
    return softmax(jnp.where(seen, scores(q, k), -1e9)) @ v


MASKS = {
    **{
        name: masked_by(mask, **expected) for name, (mask, expected) in _SPELLED.items()
    },
    **{f"two masks {x}": masked_by(two_masks, x, **LEFT) for x in NARROW},
    "arguments": case(
        masks_as_arguments,
        *bnth(),
        jnp.asarray(TRIL),
        jnp.zeros((B, T), bool).at[1, 5].set(True),
        jnp.asarray(LENGTHS),
        jnp.asarray([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]),
        mask=(B, 1, T, T),
        kv_lengths=(B,),
        q_segments=(B, T),
        kv_segments=(B, T),
        is_causal=True,
    ),
    "decoding": case(decoding, *btnh(), jnp.int32(3), q=(B, 1, N, H), kv_lengths=(B,)),
    **{
        f"decoding, {row.__name__}, {i}": case(
            functools.partial(decoding_by, row),
            *btnh(),
            jnp.int32(i),
            q=(B, 1, N, H),
            kv_lengths=(B,),
        )
        for row, starts in ((sliced, (3, 99, -99)), (sliced_of_computed, (2, 99)))
        for i in starts
    },
    "decoding, indexed": case(
        functools.partial(decoding_by, indexed),
        *btnh(),
        jnp.array([1, 4]),
        q=(B, 1, N, H),
        kv_lengths=(B,),
    ),
    "decoding several": case(
        decoding_several,
        *btnh(),
        jnp.int32(3),
        q=(B, 2, N, H),
        kv_lengths=(B,),
        is_causal=True,
        aligned_at_end=True,
    ),
    "decoding in a window": case(
        decoding_in_window,
        *btnh(N // 2),
        jnp.asarray([5, 1]),
        q=(B, 1, N, H),
        kv_lengths=(B,),
        window=(2, 0),
        aligned_at_end=True,
    ),
    "a chunk in a window": case(
        chunk_in_window,
        *bnth(),
        jnp.int32(1),
        kv_lengths=(B,),
        is_causal=True,
        window=(1, 0),
        aligned_at_end=True,
    ),
}

# --- segments -------------------------------------------------------------------------

IDS = jnp.asarray([[3, 3, 3, -1, -1, 0], [7, 7, 7, 7, 7, 7]])
OWN_KEYS = jnp.asarray([[3, -1, 3, 0, 0, 3, 7, 7], [7, 7, 3, 3, 3, 3, 3, 3]], "int8")
PACKED = {"q_segments": (B, T), "kv_segments": (B, T)}


def same_document(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    return softmax(jnp.where(mask, scores(q, k), -1e9)) @ v


def same_as_jax(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    same = (ids[:, None] == ids[None, :])[None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)


def same_as_flax(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    mask = nn.make_attention_mask(ids, ids, jnp.equal, dtype="bool")
    return nn.dot_product_attention(q, k, v, mask=mask)


def flax_packed(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    same = nn.make_attention_mask(ids, ids, jnp.equal)
    own = nn.make_attention_mask(ids > -1, ids > -1)
    mask = nn.combine_masks(nn.make_causal_mask(ids), same, own)
    # What no query of padding sees is of no interest.
    o = nn.dot_product_attention(q, k, v, mask=mask)
    return jnp.where((ids > -1)[..., None, None], o, 0)


def grouped(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    """Keys of several heads, a mask that is added: as in MaxText."""
    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k) * SCALE
    mask = (ids[:, :, None] == ids[:, None, :])[:, None, None] & jnp.asarray(TRIL)
    s = s + jnp.where(mask, 0.0, -0.7 * float(np.finfo(np.float32).max))
    return jnp.einsum("bkgts,bskh->btkgh", softmax(s), v)


def other_keys(q: Any, k: Any, v: Any, ids: Any, keys: Any) -> jax.Array:
    mask = jnp.expand_dims(keys, (1, 2)) == jnp.expand_dims(ids, (1, 3))
    return softmax(jnp.where(~mask, -jnp.inf, scores(q, k))) @ v


SEGMENTS = {
    "by hand": case(same_document, *bnth(), IDS, **PACKED),
    "bfloat16": case(same_document, *bnth(dtype="bfloat16"), IDS, **PACKED),
    "jax.nn": case(same_as_jax, *btnh(), IDS[0], is_causal=True, **PACKED),
    "flax": case(same_as_flax, *btnh(), IDS, **PACKED),
    "flax, packed": case(
        flax_packed, *btnh(), IDS, is_causal=True, mask=(B, 1, T, T), **PACKED
    ),
    "grouped": case(grouped, *btnh(K), IDS, is_causal=True, **PACKED),
    "chunks": case(
        lambda q, k, v: same_document(q, k, v, jnp.arange(T)[None] // 2),
        *bnth(),
        **PACKED,
    ),
    "captured": case(lambda q, k, v: same_document(q, k, v, IDS), *bnth(), **PACKED),
    "other keys": case(
        other_keys,
        *bnth(s=8),
        IDS.astype("int8"),
        OWN_KEYS,
        q_segments=(B, T),
        kv_segments=(B, 8),
    ),
}
