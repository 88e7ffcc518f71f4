"""Products that an activation follows, and operands for them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from numerics import normal

SQRT_2_PI = math.sqrt(2 / math.pi)


def after_product(activation):
    return lambda x, w: activation(x @ w)


def operands(dtype="float32", scale=1.0):
    """x, w; no product is near zero, where 16-bit functions have no relative error."""
    x, w = normal(6, 8), normal(8, 5, seed=1) * scale
    assert jnp.abs(x @ w).min() > 1e-2 * scale
    return x.astype(dtype), w.astype(dtype)


AWKWARD = [0.0, -0.0, 1e-37, -1e-37, 1e-20, -3e8, 1.5, -2.5, 30.0, -60.0, 150.0]
AWKWARD += [2e38, -2e38, 3.3e38, np.nan, np.inf, -np.inf]
ONE = jnp.ones((1, 1))
