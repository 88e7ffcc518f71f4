"""Programs that bundles are made of: a ResNet block, a transformer's MLP, attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracea_jax as tracea
from tracea_jax.typing import Implementation

conv = functools.partial(
    jax.lax.conv_general_dilated,
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)


Program = tuple[Callable[..., Any], jax.Array]  # a function and its input


class Arrays:
    """Random arrays of one dtype."""

    def __init__(self, dtype: Any, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self._random.normal(size=shape) * scale, self._dtype)


def resnet_block(dtype: Any, channels: int = 64, size: int = 16) -> Program:
    """A block that halves the image and doubles the channels, and its input."""
    array, wide = Arrays(dtype), 2 * channels
    p = {
        "w1": array(3, 3, channels, wide, scale=0.05),
        "b1": array(wide),
        "w2": array(3, 3, wide, wide, scale=0.05),
        "b2": array(wide),
        "w3": array(1, 1, channels, wide, scale=0.1),
        "b3": array(wide),
    }

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h = jax.nn.relu(conv(x, p["w1"], (2, 2)) + p["b1"])
        shortcut = conv(x, p["w3"], (2, 2)) + p["b3"]
        return jax.nn.relu(conv(h, p["w2"], (1, 1)) + p["b2"] + shortcut)

    return functools.partial(block, p), array(2, size, size, channels)


def mlp(dtype: Any, width: int = 256, tokens: int = 96) -> Program:
    """A transformer's MLP with its residual, and its input."""
    array = Arrays(dtype, 1)
    p = {
        "w1": array(width, 4 * width, scale=0.05),
        "b1": array(4 * width),
        "w2": array(4 * width, width, scale=0.05),
        "b2": array(width),
    }

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ p["w1"] + p["b1"])
        return x + (h @ p["w2"] + p["b2"])

    return functools.partial(block, p), array(2, tokens, width)


def attention_block(
    dtype: Any, implementation: Implementation, heads: int = 4, head_dim: int = 64
) -> Program:
    """Causal self-attention with its projections and residual, and its input."""
    array, width = Arrays(dtype, 2), heads * head_dim
    p = {name: array(width, heads, head_dim, scale=0.05) for name in "qkv"}
    p["o"] = array(heads, head_dim, width, scale=0.05)

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[name]) for name in "qkv")
        y = tracea.ops.attention(q, k, v, is_causal=True, implementation=implementation)
        return x + jnp.einsum("bshe,hed->bsd", y, p["o"])

    return functools.partial(block, p), array(2, 128, width)


def in_jax(fn: Callable[..., Any], *args: Any, implementation: str) -> np.ndarray:
    """What the same kernels compute in a JAX program."""
    with tracea.options(implementation=implementation):
        return np.asarray(jax.jit(tracea.transform(fn))(*args))
