"""Attention as people write it, each spelling with the op call that it must become."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and the one call that it becomes.

    Attributes:
      fn, args: the program.
      scale, is_causal, window, aligned_at_end: parameters of the call.
      shapes: of the operands beside q, k, v, all of them; of these, if given.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    scale: float = SCALE
    is_causal: bool = False
    window: tuple[int, int] | None = None
    aligned_at_end: bool = False
    shapes: dict[str, tuple[int, ...]]


def case(fn: Any, *args: Any, **expected: Any) -> Case:
    names = ("scale", "is_causal", "window", "aligned_at_end")
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


# --- jax.nn.dot_product_attention -----------------------------------------------------


def jax_nn(args: Any, arrays: Any = (), rest: Any = (), **expected: Any) -> Case:
    """A case with these arguments; arrays are the program's, too."""
    known = dict(rest)

    def fn(q: Any, k: Any, v: Any, arrays: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, **arrays, **known)

    return case(
        fn, *args, {k: jnp.asarray(v) for k, v in dict(arrays).items()}, **expected
    )


CAUSAL = {"is_causal": True}
LEFT = {"is_causal": True, "window": (2, 0)}
KEYS, QUERIES = {"key_value_seq_lengths": LENGTHS}, {"query_seq_lengths": LENGTHS}


def all_of_jax_nn(args: Any, **shapes: Any) -> dict[str, Case]:
    of = functools.partial(jax_nn, args, **shapes)
    bias, mask = {"bias": normal(1, N, T, T)}, {"mask": MASK}
    return {
        "plain": of(),
        "scale": of((), {"scale": 0.3}, scale=0.3),
        "causal": of((), CAUSAL, **CAUSAL),
        "left": of((), {"local_window_size": (2, 0)}, **LEFT),
        "both": of((), {"local_window_size": 2}, window=(2, 2)),
        "right": of((), {"local_window_size": (T, 1)}, window=(T, 1)),
        "wide": of((), {"local_window_size": T}),
        "causal window": of((), {**CAUSAL, "local_window_size": 2}, **LEFT),
        "mask": of(mask, mask=(B, 1, T, T)),
        "mask and causal": of(mask, CAUSAL, mask=(B, 1, T, T), **CAUSAL),
        "bias": of(bias, bias=(1, N, T, T)),
        "bias and mask": of(
            {"bias": normal(B, 1, 1, T), "mask": MASK},
            bias=(B, 1, 1, T),
            mask=(B, 1, T, T),
        ),
        "keys": of(KEYS, kv_lengths=(B,)),
        "queries": of(QUERIES, q_lengths=(B,)),
        "lengths": of(
            {**KEYS, **QUERIES}, CAUSAL, q_lengths=(B,), kv_lengths=(B,), **CAUSAL
        ),
    }


def without_batch() -> Case:
    args = [x[0] for x in btnh(s=T + 3)]
    shapes = {"q": (1, T, N, H), "k": (1, T + 3, N, H)}
    return jax_nn(args, (), CAUSAL, **shapes, **CAUSAL)


JAX_NN = {
    **all_of_jax_nn(btnh()),
    "one head of keys": jax_nn(btnh(1), (), CAUSAL, k=(B, T, 1, H), **CAUSAL),
    "no batch": without_batch(),
}
JAX_NN_IN_BF16 = all_of_jax_nn(btnh(K, dtype="bfloat16"), k=(B, T, K, H))

# --- softmax --------------------------------------------------------------------------


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

# --- masks ----------------------------------------------------------------------------


def ones() -> jax.Array:
    return jnp.ones((T, T))


def row() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (T, T), 0)


def column() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (T, T), 1)


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
    """Of heads that share keys, each sequence at its own position."""
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


# What few kernels compute: calls where one does.
RARE = {
    "capped": case(capped, *bnth(), is_causal=True),
    "capped bfloat16": case(capped, *bnth(dtype="bfloat16"), is_causal=True),
    "capped with a bias": case(
        capped_with_bias, *bnth(), normal(N, T, T), is_causal=True, bias=(1, N, T, T)
    ),
    "as gemma": case(capped_as_gemma, *btnh(K), is_causal=True),
    "narrow values": case(narrow_values, *bnth(), v=(B, T, N, 3)),
}
CAPS = {"capped": 2, "capped bfloat16": 2, "capped with a bias": 3, "as gemma": 4}

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

GROUPS = {
    "jax.nn": JAX_NN,
    "jax.nn bf16": JAX_NN_IN_BF16,
    "softmax": SOFTMAX,
    "layouts": LAYOUTS,
    "shared heads": SHARED,
    "dtypes": DTYPES,
    "masks": MASKS,
    "segments": SEGMENTS,
    "biases": BIASES,
    "head masks": HEAD_MASKS,
}
