"""Attention by its definition, and arguments that several tests of attention share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from numerics import array, normal


def _definition(
    q,
    k,
    v,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    logits_soft_cap=None,
    sinks=None,
    alibi_slopes=None,
    alibi="distance",
    numpy: Any = jnp,
) -> tuple[Any, Any]:
    """(output, log-sum-exp (batch, queries, heads)) in the operands' precision.

    ``numpy`` is the library that computes it.
    """
    special: Any = jax.scipy.special if numpy is jnp else scipy.special
    k, v = (numpy.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = numpy.einsum("bihd,bjhd->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    i, j = numpy.arange(q.shape[1])[:, None], numpy.arange(k.shape[1])[None]
    if alibi_slopes is not None:
        ahead = -numpy.abs(i - j) if alibi == "distance" else j - i
        scores = scores + alibi_slopes[:, None, None] * ahead
    if logits_soft_cap is not None:
        scores = logits_soft_cap * numpy.tanh(scores / logits_soft_cap)
    allowed = numpy.ones(scores.shape, bool) if mask is None else mask
    if is_causal:
        allowed = allowed & (j <= i)
    if local_window_size is not None:
        size = local_window_size
        left, right = (size, size) if isinstance(size, int) else size
        allowed = allowed & (i - left <= j) & (j <= i + right)
    if key_value_seq_lengths is not None:
        allowed = allowed & (j < key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None:
        own, theirs = query_segment_ids, key_value_segment_ids
        theirs = own if theirs is None else theirs
        same = own[..., :, None] == theirs[..., None, :]
        allowed = allowed & (same if same.ndim == 2 else same[:, None])
    scores = numpy.where(allowed, scores, -numpy.inf)
    lse = special.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = numpy.logaddexp(lse, sinks[:, None])
    o = numpy.einsum("bhij,bjhd->bihd", numpy.exp(scores - lse[..., None]), v)
    if query_seq_lengths is not None:
        inside = i[None] < query_seq_lengths[:, None, None]
        o = numpy.where(inside[..., None], o, 0)
    return o, lse.swapaxes(1, 2)


definition = functools.partial(
    jax.jit,
    static_argnames=(
        *("scale", "is_causal", "local_window_size", "logits_soft_cap", "alibi"),
    ),
)(_definition)


def exact(*operands: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """``definition`` in float64, by NumPy: nothing is compiled."""

    def wide(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return np.asarray(x, np.float64 if floating else None)

    operands, settings = jax.tree.map(wide, (operands, settings))
    with np.errstate(invalid="ignore"):  # of queries that see no key
        return _definition(*operands, **settings, numpy=np)


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def qkv(batch=2, q_len=6, kv_len=5, heads=4, kv_heads=2, head_dim=8):
    """Random q, k, v."""
    k = (batch, kv_len, kv_heads, head_dim)
    return normal(batch, q_len, heads, head_dim), normal(*k), normal(*k, seed=1)


def random_mask(*shape: int) -> jax.Array:
    """A random mask that allows key 0 to everyone."""
    mask = np.random.default_rng(0).random(shape) < 0.7
    mask[..., 0] = True
    return array(mask)


# For qkv(): each argument, and arguments that meet.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": normal(2, 4, 6, 5)},
    "shared bias": {"bias": normal(1, 4, 1, 5)},
    "mask": {"mask": random_mask(2, 1, 6, 5)},
    "key mask": {"mask": random_mask(2, 1, 1, 5), "bias": normal(1, 1, 6, 5)},
    "window": {"local_window_size": (2, 1)},
    "symmetric window": {"local_window_size": 1},
    "causal window": {"local_window_size": (2, 0), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": lengths(2, 5)},
    "lengths": {
        "query_seq_lengths": lengths(3, 6),
        "key_value_seq_lengths": lengths(5, 1),
        "is_causal": True,
    },
    "everything": {
        "bias": normal(1, 4, 6, 1),
        "mask": random_mask(1, 4, 1, 5),
        "is_causal": True,
        "local_window_size": (5, 2),
        "query_seq_lengths": lengths(6, 2),
        "key_value_seq_lengths": lengths(4, 5),
        "scale": -0.5,
    },
}

# For qkv(): what JAX's own attention has no argument for. Every query sees some key.
EXTRAS: dict[str, dict[str, Any]] = {
    "segments": {
        "query_segment_ids": jnp.asarray([[3, 3, 5, 5, 5, -1], [0, 0, 0, 0, 1, 0]]),
        "key_value_segment_ids": jnp.asarray([[3, 5, 3, 5, -1], [0, 0, 1, 0, 0]]),
    },
    "shared segments": {
        "query_segment_ids": jnp.asarray([1, 1, 1, 2, 2, 2]),
        "key_value_segment_ids": jnp.asarray([1, 1, 2, 2, 2], jnp.int8),
        "mask": random_mask(2, 4, 6, 5) | (jnp.arange(5) == 3),
    },
    "cap": {"logits_soft_cap": 0.7, "bias": normal(1, 4, 6, 5)},
    "sinks": {"sinks": normal(4, seed=7), "is_causal": True},
    "alibi": {"alibi_slopes": normal(4, seed=9), "bias": normal(1, 1, 6, 5)},
    "linear alibi": {
        "alibi_slopes": normal(4, seed=9),
        "alibi": "linear",
        "local_window_size": 3,
        "key_value_seq_lengths": lengths(4, 5),
    },
    "all extras": {
        "query_segment_ids": jnp.asarray([[3, 3, 5, 5, 5, 5], [0, 0, 0, 0, 0, 0]]),
        "key_value_segment_ids": jnp.asarray([[3, 3, 5, 5, 5], [0, 0, 0, 0, 0]]),
        "logits_soft_cap": 1.5,
        "sinks": normal(4, seed=8),
        "alibi_slopes": normal(4, seed=9),
        "is_causal": True,
        "bias": normal(2, 1, 6, 5),
        "key_value_seq_lengths": lengths(4, 5),
        "local_window_size": (3, 0),
        "scale": 0.6,
    },
}
