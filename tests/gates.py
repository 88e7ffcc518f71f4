"""Gated products in plain code and in float64, for the tests of gated products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import Exact, activate, exact, normal
from transforms import LAYOUTS, PLAIN


def plain_gated(activation: str, x: Any, w_gate: Any, w_up: Any) -> jax.Array:
    """A gated product as users write it."""
    return PLAIN[activation](x @ w_gate) * (x @ w_up)


def exact_gated(x: Any, w_gate: Any, w_up: Any, activation: str = "silu") -> Exact:
    """activation(x @ w_gate) * (x @ w_up) in float64."""
    g, u = exact(x, w_gate), exact(x, w_up)
    activated = activate(g.value, activation)
    scale = np.abs(u.value) * g.scale + np.abs(activated) * u.scale
    return Exact(value=activated * u.value, scale=scale)


def assert_gated(result: jax.Array, *operands: Any, roundings: int = 1) -> None:
    """Asserts that a result is within some roundings to its dtype of the exact one.

    Args:
      operands: x, w_gate, w_up and, if it is not silu, the activation.
      roundings: 2 where a kernel stores one factor first, 3 where both are stored.
    """
    expected = exact_gated(*operands)
    unit, eps = 2.0**-24, float(jnp.finfo(result.dtype).eps)
    # ``assert_near`` allows one rounding, and 16 units of the scale.
    stored = (roundings - 1) * eps / 2 * np.abs(expected.value) / (16 * unit)
    Exact(value=expected.value, scale=expected.scale + stored).assert_near(result)


def arguments(
    m: int = 5, n: int = 3, k: int = 4, dtype: str = "float32"
) -> tuple[jax.Array, ...]:
    """x, w_gate, w_up."""
    args = normal(m, k), normal(k, n), normal(k, n, seed=1)
    return tuple(a.astype(dtype) for a in args)


# Layouts, and which operands have a batch dimension.
FORMS = list(zip(LAYOUTS, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True))
