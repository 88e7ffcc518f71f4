"""Packed documents: each row of a batch holds several, which must not see each other.

    python documents.py                  # plain against transformed
    tracea explain documents:train_step  # what each site of the step runs on, and why

Paragraphs of the text are packed into rows, so that nothing is computed for padding.
Segment ids say which token is of which paragraph; the mask of attention is a comparison
of them. The model is plain JAX with optax: a gated MLP, no classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import side_by_side

import tracea_jax as tracea

WIDTH, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 128, 384, 4, 2, 256, 4
OPTIMIZER = optax.adam(2e-3)


def packed() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids, (rows, LENGTH): what does not fit begins the next row."""
    tokens = np.frombuffer(corpus.text(), np.uint8).astype(np.int32)
    # A paragraph ends with two line feeds; its number is how many have ended before.
    ends = (tokens[:-1] == 10) & (tokens[1:] == 10)
    segments = np.concatenate([[0], np.cumsum(ends)])[: len(tokens)].astype(np.int32)
    rows = len(tokens) // LENGTH
    return tuple(x[: rows * LENGTH].reshape(rows, LENGTH) for x in (tokens, segments))


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    tokens, segments = packed()
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.choice(len(tokens), BATCH, replace=False)
        yield tokens[rows], segments[rows]


def parameters() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 5 * LAYERS))

    def weights(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer() -> Any:
        return {
            "qkv": weights(WIDTH, 3 * WIDTH),
            "out": weights(WIDTH, WIDTH),
            "gate": weights(WIDTH, HIDDEN),
            "up": weights(WIDTH, HIDDEN),
            "down": weights(HIDDEN, WIDTH),
        }

    tokens = 0.02 * weights(corpus.VOCABULARY, WIDTH)
    return {"tokens": tokens, "layers": [layer() for _ in range(LAYERS)]}


def forward(params: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    batch, length = tokens.shape
    order = jnp.arange(length)
    is_same = segments[:, :, None] == segments[:, None, :]
    sees = (is_same & (order <= order[:, None]))[:, None]  # every head sees the same
    x = params["tokens"][tokens]
    for p in params["layers"]:
        qkv = (normalised(x) @ p["qkv"]).reshape(batch, length, 3, HEADS, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, mask=sees)
        x = x + mixed.reshape(x.shape) @ p["out"]
        y = normalised(x)
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return normalised(x) @ params["tokens"].T


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def loss(params: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Mean over the tokens that are followed by one of their own document."""
    logits = forward(params, tokens, segments)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(where=segments[:, :-1] == segments[:, 1:])


def train_step(state: Any, tokens: jax.Array, segments: jax.Array) -> Any:
    """The next parameters and optimizer state, and the loss."""
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params, tokens, segments)
    updates, moments = OPTIMIZER.update(grads, moments)
    return (optax.apply_updates(params, updates), moments), value


def start() -> Any:
    params = parameters()
    return params, OPTIMIZER.init(params)


def train_step_args() -> tuple[Any, ...]:
    return start(), *next(batches(1))


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=60)
    plain = jax.jit(train_step, donate_argnums=0)
    fast = jax.jit(tracea.transform(train_step), donate_argnums=0)
    outcome = side_by_side.compare(
        side_by_side.Carrying(step=plain, state=start()),
        side_by_side.Carrying(step=fast, state=start()),
        batches(options.steps),
    )
    print(outcome)


if __name__ == "__main__":
    main()
