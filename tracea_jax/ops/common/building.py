"""Problems from plain values: what the builders of the ops share.

A builder is in ``ops/<op>/builder.py``, with what the command line takes for it. The
graph and the command line reach both through the op's record.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import catalogue
from tracea_jax.mistakes import shown, similar
from tracea_jax.ops.common.precision import (
    canonical_precision,
    precision_from_name,
    precision_name,
)
from tracea_jax.ops.common.typed import make_jaxpr
from tracea_jax.options import options
from tracea_jax.problem import Epilogue


def array(dtype: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An abstract array.

    Args:
      dtype: what JAX takes for one, or a short name: "bf16", "fp32", "i8", "fp8".
      shape: its sizes.

    Raises:
      ValueError: on a dtype that JAX does not know, or has not enabled.
    """
    try:
        wanted = jnp.dtype(_in_full(dtype) if isinstance(dtype, str) else dtype)
    except TypeError as e:
        raise unknown_dtype(dtype) from e
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{wanted} arrays need the variable JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(shape, wanted)


_COMMON = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
_KINDS = {
    **dict.fromkeys(("f", "fp"), "float"),
    **dict.fromkeys(("i", "s"), "int"),
    **{"bf": "bfloat", "u": "uint", "c": "complex"},
}
# The format that most kernels of 8-bit floats take is the one with four exponent bits.
_FLOAT8 = {
    **dict.fromkeys(("fp8", "f8", "fp8_e4m3", "e4m3", "e4m3fn"), "float8_e4m3fn"),
    **dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2"),
}


def unknown_dtype(dtype: Any) -> ValueError:
    """The error about a dtype that JAX does not know."""
    full = _in_full(dtype) if isinstance(dtype, str) else dtype
    return ValueError(
        f"dtype {shown(dtype)} is unknown to JAX; it is a name such as "
        f"{', '.join(_COMMON)}{similar(full, _COMMON)}"
    )


def _in_full(name: str) -> str:
    """JAX's name of a dtype from a short one, as jaxprs and papers have them."""
    short = name.lower()
    if short in _FLOAT8:
        return _FLOAT8[short]
    if found := re.fullmatch(r"fp?8_?(e\dm\d\w*)", short):
        return f"float8_{found[1]}"
    if (found := re.fullmatch(r"([a-z]{1,2})(\d+)", short)) and found[1] in _KINDS:
        return _KINDS[found[1]] + found[2]
    return name


def product_fields(
    m: int,
    n: int,
    k: int,
    dtype: Any,
    out: Any,
    batch: int,
    layout: str,
    precision: Any,
) -> dict[str, Any]:
    """Fields that the problems of a product and of a gated pair of them share."""
    batch, m, n, k = sizes(batch=batch, m=m, n=n, k=k)
    if layout not in ("nn", "nt", "tn", "tt"):
        raise ValueError(f"{layout=} must be one of nn, nt, tn, tt")
    operand = array(dtype, ()).dtype.name
    return {
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "lhs": operand,
        "rhs": operand,
        "out": operand if out is None else array(out, ()).dtype.name,
        "layout": layout,
        "lhs_batched": batch > 1,
        "rhs_batched": batch > 1,
        "precision": _precision(precision),
    }


def _precision(precision: Any) -> str:
    if isinstance(precision, str):
        return precision_name(precision_from_name(precision))
    return precision_name(canonical_precision(precision))


def epilogue(bias: bool, activation: Any, residual: bool) -> Epilogue:
    """An epilogue with a bias of one vector; it checks the activation's name."""
    return Epilogue(
        bias="row" if bias else "none", activation=activation, residual=residual
    )


def sizes(**named: int) -> tuple[int, ...]:
    """The sizes, each a positive integer.

    Raises:
      ValueError: naming the one that is none.
    """
    given: dict[str, Any] = named  # also what is no integer
    for name, size in given.items():
        if not (isinstance(size, numbers.Integral) and int(size) >= 1):
            raise ValueError(f"{name}={shown(size)} must be an integer of at least 1")
    return tuple(map(int, named.values()))


def check_direction(direction: str, *valid: str) -> None:
    """Raises ValueError unless the direction is one of those that the op has."""
    if direction not in valid:
        raise ValueError(f"{direction=} must be one of {', '.join(valid)}")


def asked(call: Callable[..., Any], dtype: Any, *shapes: tuple[int, ...]) -> Any:
    """The problem that a call of an op asks, as the op's own primitive describes it.

    Args:
      call: (*arrays) -> the op's result; traced, never run.
      dtype: of all arrays.
      *shapes: of each.
    """
    with options(on_miss="heuristic"):
        jaxpr = make_jaxpr(call)(*(array(dtype, shape) for shape in shapes))
    planned = catalogue.planned()
    (eqn,) = (eqn for eqn in _equations(jaxpr) if eqn.primitive in planned)
    avals = [x.aval for x in eqn.invars]
    return planned[eqn.primitive].problem_of(avals, **eqn.params)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a trace; some versions of JAX leave an inlined ``jit`` in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        if (inner := eqn.params.get("jaxpr")) is not None:
            yield from _equations(inner)
