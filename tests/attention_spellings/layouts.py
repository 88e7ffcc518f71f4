"""Orders of dimensions, heads that share keys, scales and dtypes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from numerics import normal

from attention_spellings.base import (
    MASK,
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
    scores,
    softmax,
)

# --- layouts --------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, mask: Any = None) -> jax.Array:
    """One head: (length, width)."""
    s = q @ k.T / 4
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    return softmax(s, axis=-1) @ v


def by_vmap(axis: int, mask: Any) -> Case:
    """Heads and batch; ``axis`` is that of the heads."""
    heads = jax.vmap(functools.partial(attend, mask=mask), axis - 1, axis - 1)
    args = bnth() if axis == 1 else btnh()
    causal = mask is not None
    return case(jax.vmap(heads), *args, scale=1 / 4, is_causal=causal, q=(B, T, N, H))


def merged_heads(q: Any, k: Any, v: Any) -> jax.Array:
    p = softmax(jnp.einsum("bthd,bshd->bhts", q, k) * SCALE)
    return jnp.einsum("bhts,bshd->bthd", p, v).reshape(B, T, N * H)


def heads_after_queries(q: Any, k: Any, v: Any) -> jax.Array:
    p = softmax(jnp.einsum("bthd,bshd->bths", q, k) * SCALE)
    return jnp.einsum("bths,bshd->bthd", p, v)


def keys_first(q: Any, k: Any, v: Any) -> jax.Array:
    s = jnp.einsum("bnsh,bnth->bnst", k, q) * SCALE
    return jnp.einsum("bnsh,bnst->bnth", v, softmax(s, axis=-2))


def batch_and_heads_in_one(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
    q, k, v = (x.reshape(B * N, T, H) for x in (q, k, v))
    s = scores(q, k).reshape(B, N, T, T)
    s = jnp.where(mask, s, jnp.finfo(s.dtype).min).reshape(B * N, T, T)
    return (softmax(s) @ v).reshape(B, N, T, H).swapaxes(1, 2).reshape(B, T, N * H)


def projected(x: Any, weights: Any, out: Any) -> jax.Array:
    q, k, v = ((x @ w).reshape(B, T, N, H).transpose(0, 2, 1, 3) for w in weights)
    o = softmax(scores(q, k)) @ v
    return o.transpose(0, 2, 1, 3).reshape(B, T, N * H) @ out


def projected_and_turned(x: Any, w: Any) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dnh->bnth", x, w_) for w_ in w)
    return jnp.einsum("bnth,dnh->btd", softmax(scores(q, k)) @ v, w[0])


def one_head(mask: Any) -> Case:
    args = [x[0, 0] for x in bnth()]
    fn = functools.partial(attend, mask=mask)
    causal = mask is not None
    return case(fn, *args, scale=1 / 4, is_causal=causal, q=(1, T, 1, H))


_WHOLE = {"q": (B, T, N, H)}
LAYOUTS = {
    "one head": one_head(None),
    "one causal head": one_head(TRIL),
    **{f"vmap {i} {m is None}": by_vmap(i, m) for i in (1, 2) for m in (None, TRIL)},
    "merged heads": case(merged_heads, *btnh(), **_WHOLE),
    "heads after queries": case(heads_after_queries, *btnh(), **_WHOLE),
    "keys first": case(keys_first, *bnth(), **_WHOLE),
    "batch and heads in one": case(
        batch_and_heads_in_one, *bnth(), jnp.asarray(MASK), mask=(B, 1, T, T), **_WHOLE
    ),
    "projected": case(
        projected,
        normal(B, T, 5),
        [normal(5, N * H, seed=i) / 2 for i in range(3)],
        normal(N * H, 3),
        **_WHOLE,
    ),
    "projected and turned": case(
        projected_and_turned, normal(B, T, 5), normal(3, 5, N, H), **_WHOLE
    ),
}

# --- shared heads ---------------------------------------------------------------------


def repeated(causal: bool, q: Any, k: Any, v: Any) -> jax.Array:
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * SCALE
    s = jnp.where(TRIL, s, -1e9) if causal else s
    return jnp.einsum("bhts,bshd->bthd", softmax(s), v)


def in_groups(causal: bool, q: Any, k: Any, v: Any) -> jax.Array:
    q = q.reshape(B, K, N // K, T, H)
    s = jnp.einsum("bkgtd,bksd->bkgts", q, k) * SCALE
    s = jnp.where(TRIL, s, -1e9) if causal else s
    return jnp.einsum("bkgts,bksd->bkgtd", softmax(s), v).reshape(B, N, T, H)


def one_for_all(q: Any, k: Any, v: Any) -> jax.Array:
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * SCALE
    return jnp.einsum("bhts,bsd->bthd", softmax(s), v[:, :, 0])


def tiled(q: Any, k: Any, v: Any) -> jax.Array:
    k, v = (jnp.tile(x, (1, N // K, 1, 1)) for x in (k, v))
    return softmax(scores(q, k)) @ v


SHARED = {
    **{
        f"repeated {kv} {causal}": case(
            functools.partial(repeated, causal),
            *btnh(kv),
            is_causal=causal,
            k=(B, T, kv, H),
            **_WHOLE,
        )
        for kv in (1, K)
        for causal in (False, True)
    },
    **{
        f"in groups {causal}": case(
            functools.partial(in_groups, causal),
            *bnth(K),
            is_causal=causal,
            k=(B, T, K, H),
            **_WHOLE,
        )
        for causal in (False, True)
    },
    "one for all": case(one_for_all, *btnh(1), k=(B, T, 1, H), **_WHOLE),
    "tiled": case(tiled, *bnth(K), k=(B, T, K, H), **_WHOLE),
}

# --- scales and dtypes ----------------------------------------------------------------


def scaled_anywhere(q: Any, k: Any, v: Any) -> jax.Array:
    q, k = q / jnp.sqrt(H).astype(q.dtype), 0.5 * k
    return softmax(q @ jnp.swapaxes(k, -1, -2) * 3 / 2.0) @ v


def wide(queries: bool, probabilities: bool, q: Any, k: Any, v: Any) -> jax.Array:
    if queries:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    s = jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=jnp.float32)
    p = softmax(s * SCALE)
    p = p if probabilities else p.astype(v.dtype)
    return jnp.einsum("bnts,bnsh->bnth", p, v).astype(v.dtype)


def widened(q: Any, k: Any, v: Any) -> jax.Array:
    return (softmax(scores(q, k)) @ v).astype(jnp.float32)


DTYPES = {
    "scaled anywhere": case(scaled_anywhere, *bnth(), scale=SCALE * 0.5 * 3 / 2),
    **{
        f"wide {queries} {probabilities}": case(
            functools.partial(wide, queries, probabilities), *bnth(dtype="bfloat16")
        )
        for queries in (False, True)
        for probabilities in (False, True)
    },
    "widened": case(widened, *bnth(dtype="bfloat16")),
}
