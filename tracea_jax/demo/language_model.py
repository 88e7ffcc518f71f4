"""A Llama-style language model and its loss, in plain JAX.

Nothing of the package is used here: ``tracea.transform`` is applied by the callers,
which are the demo, benchmarks/bench_models and benchmarks/bench_tracing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Parameters = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """Sizes of a language model, and its computation.

    Attributes:
      batch, tokens: number of sequences, and of tokens in each.
      layers, vocabulary: number of layers, and of different tokens.
      width, hidden: features of the residual stream, and inside the gated MLP.
      heads, kv_heads: number of heads of queries, and of keys and values.
      dtype: dtype of parameters and activations.
    """

    batch: int
    tokens: int
    layers: int
    vocabulary: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.batch} x {self.tokens} tokens, width "
            f"{self.width}, {self.heads}/{self.kv_heads} heads, MLP {self.hidden}, "
            f"vocabulary {self.vocabulary}, {self.dtype}"
        )

    def inputs(self, seed: int = 0) -> tuple[Parameters, jax.Array]:
        """Parameters and random tokens, (batch, tokens + 1)."""
        keys = jax.random.split(jax.random.key(seed), self.layers + 2)
        shape = (self.batch, self.tokens + 1)
        tokens = jax.random.randint(keys[0], shape, 0, self.vocabulary)
        layers = [self.layer_parameters(key) for key in keys[2:]]
        embedding = self._weights(keys[1], self.vocabulary, self.width)
        ones = jnp.ones(self.width, self.dtype)
        return {"embedding": embedding, "layers": layers, "norm": ones}, tokens

    def layer_parameters(self, key: jax.Array) -> Parameters:
        """Random weights of one block, scaled so that activations keep their size."""
        head = self.width // self.heads
        shapes = {
            "query": (self.width, self.heads * head),
            "key": (self.width, self.kv_heads * head),
            "value": (self.width, self.kv_heads * head),
            "out": (self.heads * head, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        keys = jax.random.split(key, len(shapes))
        layer = {
            name: self._weights(k, *shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        ones = jnp.ones(self.width, self.dtype)
        return {**layer, "attention_norm": ones, "mlp_norm": ones}

    def _weights(self, key: jax.Array, rows: int, columns: int) -> jax.Array:
        weights = jax.random.normal(key, (rows, columns)) / rows**0.5
        return weights.astype(self.dtype)

    def loss(self, params: Parameters, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of the prediction of every next token."""
        logits = self.logits(params, tokens[:, :-1])
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    def logits(self, params: Parameters, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens] * self.width**0.5
        for layer in params["layers"]:
            x = self.block(layer, x)
        return rms_norm(x, params["norm"]) @ params["embedding"].T

    def block(self, layer: Parameters, x: jax.Array) -> jax.Array:
        """Attention and MLP on the residual stream x, (batch, tokens, width)."""
        x = x + self.attention(layer, rms_norm(x, layer["attention_norm"]))
        x = x + self.mlp(layer, rms_norm(x, layer["mlp_norm"]))
        return x

    def attention(self, layer: Parameters, x: jax.Array) -> jax.Array:
        batch, tokens, _ = x.shape
        query = (x @ layer["query"]).reshape(batch, tokens, self.heads, -1)
        key = (x @ layer["key"]).reshape(batch, tokens, self.kv_heads, -1)
        value = (x @ layer["value"]).reshape(batch, tokens, self.kv_heads, -1)
        mixed = jax.nn.dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True
        )
        return mixed.reshape(batch, tokens, -1) @ layer["out"]

    def mlp(self, layer: Parameters, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + 1e-6) * scale, computed in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * size).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of (batch, tokens, heads, head size).

    Su et al., RoFormer (2021): pairs of features turn by position / 10000^(2 i / d).
    """
    tokens, size = x.shape[1], x.shape[-1]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rates = 10000.0 ** (-jnp.arange(0, size, 2, dtype=wide.dtype) / size)
    angles = jnp.arange(tokens, dtype=wide.dtype)[:, None, None] * rates
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
