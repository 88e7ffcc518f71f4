"""Taylor-mode derivatives (``jax.experimental.jet``) of our primitives.

First-order derivatives are defined beside each primitive. Callers: ``lowering``, the
primitives of attention, and ``ops.matmul.chain``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

jet: Any
try:
    from jax.experimental import jet
except ImportError:  # versions of JAX without this experiment
    jet = None


def register(primitive: Primitive, reference: Callable[..., Any]) -> None:
    """Gives a primitive the Taylor series of its reference, which XLA then computes.

    Args:
      primitive: with one result, or several.
      reference: (operands, **params) -> the same results, computed in jnp.
    """
    if jet is not None:
        jet.jet_rules[primitive] = functools.partial(_series, reference)


def _series(
    reference: Callable[..., Any], primals: Any, series: Any, **params: Any
) -> tuple[Any, Any]:
    """Results at the primals, and each result's terms of first and higher order."""
    assert jet is not None
    f = functools.partial(reference, **params)
    # jet's rules compute with Taylor coefficients; only its outermost call takes
    # derivatives.
    return jet.jet(f, tuple(primals), tuple(series), factorial_scaled=False)
