"""Operands of cross entropies, exact results, and the same thing in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import f64, normal

from tracea_jax.ops import linear_cross_entropy


def operands(
    rows: int, vocabulary: int, *, features: int = 24, dtype: Any = "float32"
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(x, w, labels, bias), with logits between about -10 and 10."""
    x = normal(rows, features, dtype=dtype)
    w = normal(vocabulary, features, dtype=dtype)
    bias = normal(vocabulary, dtype=dtype)
    rng = np.random.default_rng(rows)
    labels = jnp.asarray(rng.integers(0, vocabulary, rows), jnp.int32)
    return x, w, labels, bias


def chunked(x, w, labels, bias, chunk: Any = 16, **how):
    return linear_cross_entropy(x, w, labels, bias=bias, chunk=chunk, **how)


def gradients(f, *args):
    """Gradients of all arguments but the labels, for a cotangent that varies."""
    loss, back = jax.vjp(lambda x, w, b: f(x, w, args[2], b), args[0], args[1], args[3])
    return back(cotangent(loss))


def cotangent(loss):
    return jnp.linspace(-1, 2, loss.size, dtype=loss.dtype).reshape(loss.shape)


def exact_loss(x: Any, w: Any, labels: Any, bias: Any = 0.0) -> np.ndarray:
    """(rows,), in float64."""
    logits = f64(x) @ f64(w).T + f64(bias)
    return _lse(logits) - logits[np.arange(len(labels)), np.asarray(labels)]


def exact_gradients(
    x: Any, w: Any, labels: Any, bias: Any, cotangent: Any
) -> list[np.ndarray]:
    """Gradients of x, w and bias in float64."""
    logits = f64(x) @ f64(w).T + f64(bias)
    dlogits = np.exp(logits - _lse(logits)[:, None])
    dlogits[np.arange(len(labels)), np.asarray(labels)] -= 1
    dlogits *= f64(cotangent)[:, None]
    return [dlogits @ f64(w), dlogits.T @ f64(x), dlogits.sum(0)]


def _lse(logits: np.ndarray) -> np.ndarray:
    largest = logits.max(1)
    return largest + np.log(np.exp(logits - largest[:, None]).sum(1))


def plain(x: Any, w: Any, labels: Any, bias: Any = None) -> jax.Array:
    """The loss as people write it, (...)."""
    logits = (x @ w.T).astype(jnp.promote_types(x.dtype, jnp.float32))
    if bias is not None:
        logits = logits + bias
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def assert_near(results: Any, expected: Any, tolerance: float) -> None:
    """Asserts that errors are small beside the largest entry of each array."""
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for result, wanted in pairs:
        assert result.shape == wanted.shape
        error = np.abs(f64(result) - f64(wanted)).max(initial=0)
        assert error <= tolerance * max(np.abs(f64(wanted)).max(initial=0), 1e-3)


def temporaries(f: Any, *args: Any) -> int:
    """Bytes that a compiled program needs beside its arguments and results."""
    analysis = jax.jit(f).lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
