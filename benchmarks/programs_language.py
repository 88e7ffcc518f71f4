"""Language models of ``whole_programs``, written as their users write them.

GPT-2 in plain JAX and a training step of it, a Llama layer that decodes one token for
each of many sequences, and a block with its gradients. Nothing of the package is used
here except the Llama block of the demo; ``whole_programs`` says at which sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tracea_jax.demo.language_model import LanguageModel, rms_norm

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]  # what is done to a function before it is used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2:
    """Sizes of a GPT-2, all of whose parameters and activations have one dtype."""

    batch: int
    tokens: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.batch} x {self.tokens} tokens, width "
            f"{self.width}, {self.heads} heads, vocabulary {self.vocabulary}, "
            f"{self.dtype}"
        )

    def inputs(self) -> tuple[Any, ...]:
        """Parameters, their optimizer's state, tokens (batch, tokens + 1)."""
        keys = jax.random.split(jax.random.key(0), 7)
        n, width = self.layers, self.width

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return (0.02 * jax.random.normal(key, shape)).astype(self.dtype)

        def norm(*shape: int) -> dict[str, jax.Array]:
            return {
                "scale": jnp.ones(shape, self.dtype),
                "bias": jnp.zeros(shape, self.dtype),
            }

        def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
            bias = jnp.zeros((n, outputs), self.dtype)
            return {"weights": normal(key, n, inputs, outputs), "bias": bias}

        layers = {
            "norm_1": norm(n, width),
            "qkv": dense(keys[0], width, 3 * width),
            "out": dense(keys[1], width, width),
            "norm_2": norm(n, width),
            "up": dense(keys[2], width, 4 * width),
            "down": dense(keys[3], 4 * width, width),
        }
        params = {
            "tokens": normal(keys[4], self.vocabulary, width),
            "positions": normal(keys[5], self.tokens, width),
            "layers": layers,
            "norm": norm(width),
        }
        shape = (self.batch, self.tokens + 1)
        tokens = jax.random.randint(keys[6], shape, 0, self.vocabulary)
        return params, self.optimizer.init(params), tokens

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(3e-4)

    def step(self, wrap: Wrap) -> Function:
        """A step of training; the loss is differentiated as ``wrap`` returns it."""
        loss = wrap(self.loss)

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = self.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of the prediction of every next token."""
        logits = self.logits(params, tokens[:, :-1])
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            x = x + self.attention(layer, _layer_norm(layer["norm_1"], x))
            x = x + self.mlp(layer, _layer_norm(layer["norm_2"], x))
            return x, None

        x, _ = jax.lax.scan(body, x, params["layers"])
        return _layer_norm(params["norm"], x) @ params["tokens"].T

    def attention(self, layer: Any, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        head = width // self.heads
        q, k, v = (
            y.reshape(batch, tokens, self.heads, head)
            for y in jnp.split(_dense(layer["qkv"], x), 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return _dense(layer["out"], mixed.reshape(batch, tokens, width))

    def mlp(self, layer: Any, x: jax.Array) -> jax.Array:
        return _dense(layer["down"], jax.nn.gelu(_dense(layer["up"], x)))


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["weights"] + layer["bias"]


def _layer_norm(layer: Any, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normal.astype(x.dtype) * layer["scale"] + layer["bias"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """One layer of a language model that gets one new token of every sequence.

    Attributes:
      model: its batch is the number of sequences, its tokens the caches' length.
    """

    model: LanguageModel

    def __str__(self) -> str:
        m = self.model
        return (
            f"{m.batch} sequences, caches of {m.tokens}, width {m.width}, "
            f"{m.heads}/{m.kv_heads} heads, MLP {m.hidden}, {m.dtype}"
        )

    def inputs(self) -> tuple[Any, ...]:
        """Caches, the layer's parameters, x (sequences, 1, width), positions.

        Positions lie in the second half of the caches.
        """
        m = self.model
        keys = jax.random.split(jax.random.key(0), 5)
        cache = (m.batch, m.tokens, m.kv_heads, m.width // m.heads)
        caches = tuple(jax.random.normal(k, cache).astype(m.dtype) for k in keys[:2])
        x = jax.random.normal(keys[2], (m.batch, 1, m.width)).astype(m.dtype)
        positions = jax.random.randint(keys[3], (m.batch,), m.tokens // 2, m.tokens)
        return caches, m.layer_parameters(keys[4]), x, positions

    def step(self, caches: Any, layer: Any, x: jax.Array, positions: jax.Array) -> Any:
        """The caches with the new keys and values, and the layer's output."""
        m = self.model
        y = rms_norm(x, layer["attention_norm"])
        heads = (m.batch, 1, -1, m.width // m.heads)
        query = turned((y @ layer["query"]).reshape(heads), positions)
        key = turned((y @ layer["key"]).reshape(heads), positions)
        value = (y @ layer["value"]).reshape(heads)
        keys, values = (
            written(caches[0], key, positions),
            written(caches[1], value, positions),
        )
        mixed = jax.nn.dot_product_attention(
            query, keys, values, key_value_seq_lengths=positions + 1
        )
        x = x + mixed.reshape(x.shape) @ layer["out"]
        return (keys, values), x + m.mlp(layer, rms_norm(x, layer["mlp_norm"]))


def written(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """The cache with the new entry of each sequence at its position."""

    def one(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, new, (position, 0, 0))

    return jax.vmap(one)(cache, new, positions)


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of (sequences, 1, heads, head size) at these positions."""
    rates = 500000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions[:, None, None, None] * rates
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    halves = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


def with_gradients(function: Function) -> Function:
    """(parameters, x, ct) -> y and the gradients of parameters and x."""

    def step(parameters: Any, x: jax.Array, ct: jax.Array) -> Any:
        y, pull = jax.vjp(function, parameters, x)
        return y, pull(ct)

    return step
