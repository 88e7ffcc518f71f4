"""Attention written out in jnp, where ``jax.nn.dot_product_attention`` has no argument.

Segment ids, masks of blocks and positions that count from the end become a boolean mask
(``allowed``), ALiBi becomes a bias (``bias``). A soft cap, sinks and values of another
size than the keys need the whole formula (``attend``), which rounds where JAX's own
does. Caller: ``reference``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.ops.common.promotion import of_rank, promoted
from tracea_jax.ops.common.typed import arange, asarray, einsum, finfo

Named = dict[str, Any]  # operands by their names; those that are absent are None

# So that 16-bit operands are multiplied alike in both directions, as JAX's own are.
_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}


def allowed(spec: Any, x: Named) -> jax.Array | None:
    """The mask, with what only a mask can say of the rest; None if all is allowed."""
    parts: list[Any] = [_per_score(spec, x), _of_segments(x)]
    if spec.aligned_at_end:
        parts.append(_of_positions(spec, x))
    return _both(parts)


def bias(spec: Any, x: Named) -> jax.Array | None:
    """All that is added to the scores, broadcast to them; None if nothing is."""
    given: jax.Array | None = x["bias"]
    if x["alibi_slopes"] is None:
        return given
    ahead = _ahead(spec, x)  # a position is exact in float32
    if spec.alibi == "distance":
        ahead = -abs(ahead)
    slopes = x["alibi_slopes"][None, :, None, None]
    alibi = slopes * ahead.astype(slopes.dtype)[:, None]
    return alibi if given is None else given + alibi


def attend(spec: Any, x: Named) -> tuple[jax.Array, jax.Array]:
    """(o, log-sum-exp of each query's scores, float32 (batch, heads, q_len))."""
    q, k, v = x["q"], x["k"], x["v"]
    batch, q_len, heads, _ = q.shape
    scores = scores_of(spec, x)
    mask = visible(spec, x)
    if mask is not None:
        scores = jnp.where(mask, scores, fill(scores.dtype))
    scores = scores.astype(jnp.float32)
    p, lse = _softmax(scores, x["sinks"])
    groups = (batch, k.shape[2], heads // k.shape[2], q_len, k.shape[1])
    p = p.astype(k.dtype).reshape(groups)
    o = einsum("BKGTS,BSKD->BTKGD", p, v).reshape(*q.shape[:3], v.shape[3])
    if x["q_lengths"] is not None:
        inside = arange(q_len)[None] < x["q_lengths"][:, None]
        o = o * inside[:, :, None, None].astype(o.dtype)
    return o, jax.lax.stop_gradient(lse)


def visible(spec: Any, x: Named) -> jax.Array | None:
    """Which keys each query sees, all rules taken together; None for all."""
    return _both([allowed(spec, x), _of_start(spec, x), _of_lengths(x)])


def scores_of(spec: Any, x: Named) -> jax.Array:
    """(batch, heads, q_len, kv_len), before the masks."""
    q, k = x["q"], x["k"]
    batch, q_len, heads, head_dim = q.shape
    grouped = q.reshape(batch, q_len, k.shape[2], heads // k.shape[2], head_dim)
    scores = einsum(
        "BTKGH,BSKH->BKGTS",
        grouped,
        k,
        precision=_ALGORITHMS.get(q.dtype.name),
        preferred_element_type=promoted(q.dtype, jnp.float32),
    ).reshape(batch, heads, q_len, k.shape[1])
    scores = scores * asarray(spec.scale, scores.dtype)
    if (added := bias(spec, x)) is not None:
        scores = (scores + added).astype(scores.dtype)
    if spec.soft_cap is None:
        return scores
    cap = asarray(spec.soft_cap, scores.dtype)
    return cap * jnp.tanh(scores / cap)


def _softmax(scores: jax.Array, sinks: Any) -> tuple[jax.Array, jax.Array]:
    """Weights of the keys, and the log-sum-exp of all logits."""
    if sinks is None:
        return jax.nn.softmax(scores), jax.nn.logsumexp(scores, axis=-1)
    sink = of_rank(sinks[:, None, None], scores.ndim)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - top)
    return weights / total, jnp.squeeze(top + jnp.log(total), -1)


def fill(dtype: Any) -> np.ndarray:
    """The value of a masked score: finite, also as float32."""
    largest = min(float(finfo(dtype).max), float(finfo(jnp.float32).max))
    return np.asarray(-0.7 * largest, dtype)


# --- masks, broadcast to (batch, heads, q_len, kv_len) --------------------------------


def _both(masks: list[Any]) -> jax.Array | None:
    """The conjunction of the masks that are given."""
    found = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, found) if found else None


def _per_score(spec: Any, x: Named) -> jax.Array | None:
    """The mask with an entry for each score."""
    mask = x["mask"]
    if mask is None or spec.mask_block is None:
        return mask
    lengths = x["q"].shape[1], x["k"].shape[1]
    for axis, (block, length) in enumerate(
        zip(spec.mask_block, lengths, strict=True), start=2
    ):
        mask = jnp.take(mask, arange(length) // block, axis=axis)
    return mask


def _of_segments(x: Named) -> jax.Array | None:
    if x["q_segments"] is None:
        return None
    return (x["q_segments"][:, :, None] == x["kv_segments"][:, None, :])[:, None]


def _of_start(spec: Any, x: Named) -> jax.Array | None:
    return None if spec.aligned_at_end else _of_positions(spec, x)


def _of_positions(spec: Any, x: Named) -> jax.Array | None:
    """The mask of the rules on positions."""
    if not spec.is_causal and spec.window is None:
        return None
    ahead = _ahead(spec, x)
    rules = [ahead <= 0] if spec.is_causal else []
    if spec.window is not None:
        rules += [ahead >= -spec.window[0], ahead <= spec.window[1]]
    return functools.reduce(jnp.logical_and, rules)[:, None]


def _ahead(spec: Any, x: Named) -> jax.Array:
    """(1 or batch, q_len, kv_len): how far each key is ahead of each query."""
    return arange(x["k"].shape[1])[None, None] - _positions(spec, x)[..., None]


def _positions(spec: Any, x: Named) -> jax.Array:
    """(1 or batch, q_len): the keys at which the queries stand."""
    queries = arange(x["q"].shape[1])[None]
    if not spec.aligned_at_end:
        return queries

    def last(lengths: Any, of: Any) -> Any:
        return of.shape[1] if lengths is None else lengths[:, None]

    return queries + last(x["kv_lengths"], x["k"]) - last(x["q_lengths"], x["q"])


def _of_lengths(x: Named) -> jax.Array | None:
    q_lengths, kv_lengths = x["q_lengths"], x["kv_lengths"]
    mask = None
    if kv_lengths is not None:
        inside = arange(x["k"].shape[1])[None] < kv_lengths[:, None]
        mask = inside[:, None, None, :]
    if q_lengths is None:
        return mask
    inside = arange(x["q"].shape[1])[None] < q_lengths[:, None]
    return _both([mask, inside[:, None, :, None]])
