"""Taylor-mode derivatives of our ops and of transformed functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from numerics import normal
from slow_cases import slow_unless

import tracea_jax as tracea


def attend(q, k, v):
    return tracea.ops.attention(q, k, v, is_causal=True)


def attend_plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def convolve(x, w):
    return jnp.tanh(
        jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def mlp(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)


def gradient(x, w, v):
    return jax.grad(lambda x: mlp(x, w, v).sum())(x)


def fast_gradient(x, w, v):
    return jax.grad(lambda x: tracea.transform(mlp)(x, w, v).sum())(x)


TAYLOR = {
    "matmul": (tracea.transform(mlp), mlp, [(5, 6), (6, 6), (6, 6)]),
    "gated": (tracea.transform(gated), gated, [(5, 6), (6, 7), (6, 7)]),
    "conv2d": (tracea.transform(convolve), convolve, [(1, 5, 5, 2), (3, 3, 2, 3)]),
    "attention": (attend, attend_plain, [(1, 5, 2, 8)] * 3),
    "gradient": (fast_gradient, gradient, [(5, 6), (6, 6), (6, 6)]),
}


@pytest.mark.parametrize(
    "kind", slow_unless(["gated", "attention", "gradient"], TAYLOR)
)
def test_taylor_series(kind):
    fast, plain, shapes = TAYLOR[kind]
    primals = tuple(normal(*shape, seed=i) / 2 for i, shape in enumerate(shapes))
    series = tuple(
        [normal(*s, seed=7 + i), normal(*s, seed=9)] for i, s in enumerate(shapes)
    )
    found = jet.jet(fast, primals, series)
    expected = jet.jet(plain, primals, series)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
