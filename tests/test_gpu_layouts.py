"""Programs with channels first, of lines and with transposed convolutions, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import normal

import tracea_jax as tracea

pytestmark = pytest.mark.gpu

C = 64


def conv(x, w, numbers, strides, padding: Any = "SAME"):
    how = dict(dimension_numbers=numbers)
    return lax.conv_general_dilated(x, w, strides, padding, **how)


def block(x, v, w, shift):
    """Channels first: the image is transposed once."""
    layer = functools.partial(conv, numbers=("NCHW", "OIHW", "NCHW"), strides=(1, 1))
    y = jax.nn.silu(layer(x, v) + shift)
    window = (1, 1, 2, 2)
    y = lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID")
    return jax.nn.silu(y + layer(y, w)).mean((2, 3))


def stem(x, v, w, shift):
    """A line, as Whisper's stem."""
    layer = functools.partial(conv, numbers=("NWC", "WIO", "NWC"), padding=[(1, 1)])
    y = jax.nn.gelu(layer(x, v, strides=(1,)) + shift)
    return jax.nn.gelu(layer(y, w, strides=(2,)) + shift)


def decoder(x, v, w, shift):
    """Two steps of a U-Net's way up."""
    for weights in (v, w):
        x = jax.nn.silu(lax.conv_transpose(x, weights, (2, 2), "SAME") + shift)
    return x


PROGRAMS = {
    block: ((2, C, 12, 10), (C, C, 3, 3), (C, C, 3, 3), (C, 1, 1)),
    stem: ((2, 150, 80), (3, 80, C), (3, C, C), (C,)),
    decoder: ((2, 7, 5, 128), (2, 2, 128, C), (4, 4, C, C), (C,)),
}


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_gradients(f):
    """No further from float32 than twice XLA's own distance.

    Activations are smooth: rounding turns signs, and gradients of relu with them.
    """
    shapes = PROGRAMS[f]
    args = [normal(*s, seed=i) / np.sqrt(max(1, s[0])) for i, s in enumerate(shapes)]
    args = [(a / 3).astype(jnp.bfloat16) for a in args]

    def both(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(both)(*wide))
    with tracea.options(implementation="tracea"):
        ours = jax.tree.leaves(tracea.transform(both)(*args))
    plain = jax.tree.leaves(jax.jit(both)(*args))
    for found, other, wanted in zip(ours, plain, exact, strict=True):
        scale = float(jnp.abs(wanted).max())
        error, peer = (
            float(jnp.abs(a.astype(jnp.float32) - wanted).max()) for a in (found, other)
        )
        assert error <= 2 * peer + 2e-3 * scale
