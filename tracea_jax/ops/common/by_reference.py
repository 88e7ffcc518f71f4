"""What is made of a primitive's reference: Taylor series, and the checks of checkify.

Taylor-mode derivatives are those of ``jax.experimental.jet``; first-order derivatives
are defined beside each primitive. ``checkify`` looks for NaN, divisions by zero and
indices out of bounds in the reference's equations, so that it finds what it would find
in programs without our ops. Callers: ``lowering``, ``choice``, and primitives that it
does not make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

from tracea_jax import _compat

jet: Any
try:
    from jax.experimental import jet
except ImportError:  # versions of JAX without this experiment
    jet = None


def register(primitive: Primitive, reference: Callable[..., Any]) -> None:
    """Gives a primitive the Taylor series and the checks of its reference.

    Args:
      primitive: with one result, or several.
      reference: (operands, **params) -> the same results, computed in jnp.
    """
    _compat.register_checked(primitive, reference)
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
