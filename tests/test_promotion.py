"""The ops, and transform, in programs that forbid to mix ranks and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracea_jax as tracea
from tracea_jax import masks, ops


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


X, W, B = zeros(6, 8), zeros(8, 8), zeros(8)
Q = zeros(2, 8, 2, 4)
LENGTHS = jnp.array([3, 8], jnp.int32)
IDS = jnp.zeros(8, jnp.int32)


@pytest.fixture(autouse=True)
def forbidden() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


FUNCTIONS = {
    "matmul": lambda x: ops.matmul(x, W, bias=B, activation="gelu", residual=x),
    "matmul, 16 bits": lambda x: ops.matmul(
        narrow(x), narrow(W), bias=narrow(B), activation="silu"
    ),
    "mapped bias": lambda x: jax.vmap(lambda b: ops.matmul(x, W, bias=b))(W),
    "mapped bias of conv2d": lambda x: jax.vmap(
        lambda b: ops.conv2d(x.reshape(1, 3, 2, 8), zeros(3, 3, 8, 8), bias=b)
    )(W),
    "gated": lambda x: ops.gated_matmul(narrow(x), narrow(W), narrow(W)),
    "conv2d": lambda x: ops.conv2d(
        narrow(x.reshape(1, 3, 2, 8)), narrow(zeros(3, 3, 8, 8)), bias=narrow(B)
    ),
    "loss": lambda x: ops.linear_cross_entropy(
        narrow(x), narrow(W), IDS[:6], bias=narrow(B), chunk=3
    ),
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": zeros(2), "is_causal": True},
    "slopes": {"alibi_slopes": zeros(2), "mask": masks.window(3)},
    "lengths": {
        "query_seq_lengths": LENGTHS,
        "key_value_seq_lengths": LENGTHS,
        "logits_soft_cap": 3.0,
    },
    "from the end": {
        "key_value_seq_lengths": LENGTHS,
        "mask": masks.causal(from_end=True) & masks.window(3, from_end=True),
    },
    "segments": {"mask": masks.segments(IDS) & masks.segments(IDS) & masks.causal()},
}


def gradient(f: Any) -> Any:
    return jax.grad(lambda x: f(x).astype(jnp.float32).sum())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ops(name):
    assert jax.jit(gradient(FUNCTIONS[name])).lower(X).out_info.shape == X.shape


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    f = gradient(lambda q: ops.attention(q, q, q, **ATTENTIONS[name]))
    assert jax.jit(f).lower(Q).out_info.shape == Q.shape


def test_paged_attention():
    pages, places = zeros(2, 3, 8, 16), jnp.zeros((2, 2), jnp.int32)
    f = gradient(lambda q: ops.paged_attention(q, pages, pages, LENGTHS, places))
    assert jax.eval_shape(f, zeros(2, 4, 16)).shape == (2, 4, 16)


@pytest.mark.parametrize("device", [None, "H200"])
def test_programs(device):
    def layers(x, w):
        for _ in range(2):
            x = jax.nn.silu(x @ w + narrow(B)[None])
        return x

    def norm(x, scale):
        x = x.astype(jnp.float32)
        mean = x.mean((0, 1, 2), keepdims=True)
        variance = (x * x).mean((0, 1, 2), keepdims=True) - mean * mean
        scaled = jax.lax.rsqrt(variance + 1e-5) * scale[None, None, None]
        return jax.nn.relu(narrow((x - mean) * scaled + mean))

    x, w, images = narrow(X), narrow(W), narrow(zeros(4, 8, 8, 64))
    with tracea.options(device=device):
        step = tracea.transform(gradient(lambda w: layers(x, w)))
        assert jax.eval_shape(step, w).shape == w.shape
        step = tracea.transform(gradient(lambda scale: norm(images, scale)))
        assert jax.eval_shape(step, zeros(64)).shape == (64,)
