"""A Llama-like model writes on: plain JAX, a key-value cache, grouped queries.

    python llama.py                      # plain against transformed
    tracea explain llama:decode          # what each site runs on, and why

The prompt is read at once, then a token a call. Decoding reads every weight for a few
tokens, so memory sets its speed, and the cache must not be copied: it is donated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side

import tracea_jax as tracea

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 512, 1536, 4, 8, 2
HEAD = WIDTH // HEADS
BATCH, PROMPT, LENGTH = 4, 64, 256  # LENGTH: room in the cache
DTYPE = jnp.bfloat16


def parameters() -> Any:
    """Random weights; each layer has its own arrays.

    They are not stacked for ``scan``: on a CPU, XLA may widen all stacked bfloat16
    arrays to float32 in each call.
    """
    keys = iter(jax.random.split(jax.random.key(0), 1 + 7 * LAYERS))

    def weights(*shape: int) -> jax.Array:
        return (shape[0] ** -0.5 * jax.random.normal(next(keys), shape)).astype(DTYPE)

    def layer() -> Any:
        return {
            "query": weights(WIDTH, HEADS * HEAD),
            "key": weights(WIDTH, KV_HEADS * HEAD),
            "value": weights(WIDTH, KV_HEADS * HEAD),
            "out": weights(HEADS * HEAD, WIDTH),
            "gate": weights(WIDTH, HIDDEN),
            "up": weights(WIDTH, HIDDEN),
            "down": weights(HIDDEN, WIDTH),
            "norms": jnp.ones((2, WIDTH), DTYPE),
        }

    return {
        "tokens": weights(corpus.VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }


def empty_cache() -> Any:
    """How many tokens are written, and keys and values of every layer."""
    shape = BATCH, LENGTH, KV_HEADS, HEAD
    empty = [(jnp.zeros(shape, DTYPE), jnp.zeros(shape, DTYPE)) for _ in range(LAYERS)]
    return jnp.int32(0), empty


def decode(params: Any, cache: Any, tokens: jax.Array) -> Any:
    """Reads tokens, (batch, length): the new cache, and logits of what comes next."""
    start, layers = cache
    length = tokens.shape[1]
    x = params["tokens"][tokens]
    written = []
    for p, memory in zip(params["layers"], layers, strict=True):
        x, memory = block(p, x, start + jnp.arange(length), memory)
        written.append(memory)
    logits = rms_norm(x[:, -1], 1) @ params["tokens"].T
    return (start + length, written), logits


def block(p: Any, x: jax.Array, positions: jax.Array, memory: Any) -> Any:
    """One layer on (batch, length, width), with its keys and values."""
    keys, values = memory
    batch, length, _ = x.shape

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, -1, HEAD)

    y = rms_norm(x, p["norms"][0])
    q = rotated(heads(y @ p["query"]), positions)
    k = rotated(heads(y @ p["key"]), positions)
    at = (0, positions[0], 0, 0)
    keys = jax.lax.dynamic_update_slice(keys, k, at)
    values = jax.lax.dynamic_update_slice(values, heads(y @ p["value"]), at)
    # A query sees what is written, up to its own position. Eight heads of queries share
    # two of keys and values.
    sees = jnp.arange(LENGTH) <= positions[:, None]
    mixed = jax.nn.dot_product_attention(q, keys, values, mask=sees[None, None])
    x = x + mixed.reshape(batch, length, -1) @ p["out"]
    y = rms_norm(x, p["norms"][1])
    x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return x, (keys, values)


def rms_norm(x: jax.Array, scale: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * size).astype(x.dtype) * scale


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions on (batch, length, heads, head)."""
    rates = 10000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angles = positions[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


def prompts() -> np.ndarray:
    return next(corpus.batches(1, BATCH, PROMPT - 1))


def decode_args() -> tuple[Any, ...]:
    return parameters(), empty_cache(), prompts()[:, :1]


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=100)
    params = parameters()
    plain = jax.jit(decode, donate_argnums=1)
    fast = jax.jit(tracea.transform(decode), donate_argnums=1)
    writers = [
        side_by_side.Carrying(step=functools.partial(f, params), state=empty_cache())
        for f in (plain, fast)
    ]
    for writer in writers:
        writer(prompts())

    def written() -> Iterator[tuple[jax.Array]]:
        # Both read what plain writes: where two tokens are almost as likely, a rounding
        # decides, and the texts would part.
        for _ in range(options.steps):
            yield (writers[0].result.argmax(-1)[:, None],)

    outcome = side_by_side.compare(*writers, written(), name="logits", tolerance=0.05)
    print(outcome)
    same = outcome.plain.argmax(-1) == outcome.fast.argmax(-1)
    print(f"both would write the same token {same.sum()} times of {same.size}")


if __name__ == "__main__":
    main()
