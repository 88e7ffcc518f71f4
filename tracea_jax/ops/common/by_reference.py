"""Rules made of a primitive's reference: Taylor series, and checks of programs.

Taylor-mode derivatives are those of ``jax.experimental.jet``; first-order derivatives
are defined beside each primitive. ``checkify`` looks for NaN, divisions by zero and
indices out of bounds in the reference's equations, so that it finds what it would find
in programs without our ops. Where JAX checks what it runs outside of a trace
(``jax_debug_nans``, ``jax_debug_infs``), the error names an equation of the reference.
Callers: ``lowering``, ``choice``, and primitives that ``lowering`` does not make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tracea_jax import _compat
from tracea_jax.ops.common.typed import Primitive, xla

jet: Any
try:
    from jax.experimental import jet
except ImportError:  # versions of JAX without this experiment
    jet = None


def register(primitive: Primitive, reference: Callable[..., Any]) -> None:
    """Gives a primitive the Taylor series and the checks of its reference.

    Outside of a trace it is compiled and runs by itself.

    Args:
      primitive: with one result, or several.
      reference: (operands, **params) -> the same results, computed in jnp.
    """
    primitive.def_impl(functools.partial(_evaluated, primitive, reference))
    _compat.register_checked(primitive, reference)
    if jet is not None:
        jet.jet_rules[primitive] = functools.partial(_series, reference)


def _evaluated(
    primitive: Primitive, reference: Callable[..., Any], *operands: Any, **params: Any
) -> Any:
    try:
        return xla.apply_primitive(primitive, *operands, **params)
    except FloatingPointError:  # of jax_debug_nans or jax_debug_infs
        try:
            reference(*operands, **params)
        except FloatingPointError as e:
            raise e from None
        except Exception:  # an error of JAX's own, of calls inside the reference
            pass
        raise


def _series(
    reference: Callable[..., Any], primals: Any, series: Any, **params: Any
) -> tuple[Any, Any]:
    """Results at the primals, and each result's terms of first and higher order."""
    assert jet is not None
    f = functools.partial(reference, **params)
    # jet's rules compute with Taylor coefficients; only its outermost call takes
    # derivatives.
    return jet.jet(f, tuple(primals), tuple(series), factorial_scaled=False)
