"""Models whose attention has a bias that is learned, or follows from positions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import normal

BUCKETS = 32


def parameters(heads: int, head_dim: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Parameters of ``t5`` and ``alibi``: projections, a bias per bucket and head."""
    width = heads * head_dim
    shapes = {"q": 1, "k": 2, "v": 3, "o": 4}
    found = {n: normal(width, width, seed=i) / width**0.5 for n, i in shapes.items()}
    found["table"] = normal(BUCKETS, heads, seed=5)
    return {name: x.astype(dtype) for name, x in found.items()}


def _buckets(length: int) -> np.ndarray:
    """T5's buckets of relative positions, those of later keys apart."""
    ahead = np.arange(1 - length, length)
    half, exact = BUCKETS // 2, BUCKETS // 4
    distance = np.abs(ahead)
    far = np.log(np.maximum(distance, 1) / exact) / math.log(128 / exact)
    large = np.minimum(exact + (far * (half - exact)).astype(int), half - 1)
    bucket = np.where(distance < exact, distance, large) + half * (ahead > 0)
    at = np.arange(length)
    return bucket[length - 1 + at[None] - at[:, None]]


def _heads(parameters: dict[str, Any], x: jax.Array, name: str) -> jax.Array:
    heads = parameters["table"].shape[1]
    return (x @ parameters[name]).reshape(*x.shape[:2], heads, -1)


def _attend(
    parameters: dict[str, Any],
    x: jax.Array,
    bias: Any,
    scale: float = 1.0,
    mask: Any = None,
) -> jax.Array:
    q, k, v = (_heads(parameters, x, name) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores.astype("float32"), axis=-1)
    o = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)
    return o.reshape(x.shape) @ parameters["o"]


def t5(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    """A loss of a layer of T5's encoder."""
    bias = parameters["table"][_buckets(x.shape[1])].transpose(2, 0, 1)[None]
    y = x + _attend(parameters, x, bias)
    return (y.astype("float32") ** 2).mean()


def alibi(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    """A loss of a layer with ALiBi and a causal mask."""
    heads = parameters["table"].shape[1]
    slopes = jnp.asarray(2.0 ** (-8 / heads * np.arange(1, heads + 1)), "float32")
    at = jnp.arange(x.shape[1])
    bias = slopes[:, None, None] * (at[None] - at[:, None])
    scale = (x.shape[2] // heads) ** -0.5
    y = x + _attend(parameters, x, bias, scale, at[None] <= at[:, None])
    return (y.astype("float32") ** 2).mean()
