"""A layer, and helpers that the tests of transform as a function of functions share."""

from __future__ import annotations

import jax
from numerics import normal


def block(x, w, b):
    return jax.nn.gelu(x @ w + b)


def arguments():
    return normal(6, 8), normal(8, 5, seed=1), normal(5)


def total(*args):
    return (block(*args) ** 2).sum()
