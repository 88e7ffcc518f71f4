"""Losses as people write them, and comparing what becomes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numerics import normal

import tracea_jax as tracea

B, T, D, V = 2, 6, 8, 40
ROWS = B * T


def operands(dtype: Any = "float32"):
    x, w = normal(B, T, D, dtype=dtype), normal(V, D, dtype=dtype)
    labels = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)), jnp.int32)
    return x, w, labels


def found(f, *args, **how) -> int:
    """How many cross entropies of f become ours."""
    return tracea.explain(f, **how)(*args).ops.get("linear_cross_entropy", 0)


def misses(f, *args) -> list[str]:
    every = tracea.explain(f)(*args).misses
    return [m.reason for m in every if m.op == "linear_cross_entropy"]


def logits_of(x, w):
    return (x @ w.T).astype(jnp.float32)


def take(scores, labels):
    return jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def by_hand(z, labels):
    shifted = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    return jnp.log(jnp.exp(shifted).sum(-1)) - take(shifted, labels)


def by_hand_unstopped(z, labels):
    largest = jnp.max(z, -1)
    lse = largest + jnp.log(jnp.sum(jnp.exp(z - largest[..., None]), -1))
    return lse - take(z, labels)


def flat(f):
    return lambda z, labels: f(z.reshape(-1, V), labels.reshape(-1))


LOSSES = {
    "log_softmax, take": lambda z, y: -take(jax.nn.log_softmax(z), y),
    "mean of kept dimension": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], axis=-1).mean()
    ),
    "clipped labels": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], -1, mode="clip")
    ),
    "optax, integers": optax.softmax_cross_entropy_with_integer_labels,
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, V)),
    "logsumexp, take": lambda z, y: jax.nn.logsumexp(z, -1) - take(z, y),
    "logsumexp, kept": lambda z, y: (
        jax.nn.logsumexp(z, -1, keepdims=True)
        - jnp.take_along_axis(z, y[..., None], -1)
    ),
    "logsumexp, one-hot": lambda z, y: (
        jax.nn.logsumexp(z, -1) - (jax.nn.one_hot(y, V) * z).sum(-1)
    ),
    "subtracted before": lambda z, y: (
        -take(z - jax.nn.logsumexp(z, axis=-1, keepdims=True), y)
    ),
    "one-hot, summed": lambda z, y: (
        -(jax.nn.one_hot(y, V) * jax.nn.log_softmax(z)).sum()
    ),
    "one-hot, batch mean": lambda z, y: (
        -(jax.nn.log_softmax(z) * jax.nn.one_hot(y, V)).sum((-2, -1)).mean()
    ),
    "where": lambda z, y: (
        -jnp.where(jnp.arange(V) == y[..., None], jax.nn.log_softmax(z), 0).sum(-1)
    ),
    "indices": flat(lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(len(y)), y]),
    "three indices": lambda z, y: (
        -jax.nn.log_softmax(z)[jnp.arange(B)[:, None], jnp.arange(T)[None], y]
    ),
    "vmap": lambda z, y: jax.vmap(jax.vmap(lambda a, i: -jax.nn.log_softmax(a)[i]))(
        z, y
    ),
    "vmap of take": lambda z, y: jax.vmap(lambda a, i: -take(jax.nn.log_softmax(a), i))(
        z, y
    ),
    "by hand": by_hand,
    "by hand, unstopped": by_hand_unstopped,
    "flat rows": flat(optax.softmax_cross_entropy_with_integer_labels),
    "next token": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(
        z[:, :-1], y[:, 1:]
    ).mean(),
    "weighted mean": lambda z, y: (
        jnp.sum((y > 5) * by_hand(z, y)) / jnp.maximum(jnp.sum(y > 5), 1)
    ),
    "log-likelihood": lambda z, y: take(jax.nn.log_softmax(z), y).sum(-1),
    "perplexity": lambda z, y: jnp.exp(-take(jax.nn.log_softmax(z), y).mean()),
}
