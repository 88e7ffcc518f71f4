"""Elementwise equations on known values, with the semantics that XLA gives each dtype.

Integers wrap around, casts saturate or wrap as XLA's do, bit operations work on bits,
NaN and infinities take part. Arithmetic rounds to the dtype; elementary functions are
computed in float64 and rounded once, so that XLA's may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import special

Equation = Any


def evaluate(eqn: Equation, *operands: np.ndarray) -> np.ndarray | None:
    """The value of an elementwise equation; None if it is not one that is known here.

    Args:
      eqn: the equation.
      *operands: one for each of its operands, of the operand's dtype; shapes that
        broadcast to the result's.
    """
    return apply(eqn.primitive.name, eqn.params, *operands)


def apply(
    name: str, params: Mapping[str, Any], *operands: np.ndarray
) -> np.ndarray | None:
    """The value of a primitive for operands of any dtype, as ``evaluate`` gives it."""
    operation = _OPERATIONS.get(name)
    if operation is None or not all(is_known(x.dtype) for x in operands):
        return None
    with np.errstate(all="ignore"):
        result = operation(params, *operands)
    return None if result is None else np.asarray(result)


def is_elementwise(eqn: Equation) -> bool:
    """Returns whether ``evaluate`` knows an equation's primitive."""
    return eqn.primitive.name in _OPERATIONS


def is_known(dtype: Any) -> bool:
    """True if values of a dtype are evaluated: booleans, integers and real floats."""
    return _is_boolean(dtype) or _is_integer(dtype) or _is_float(dtype)


@np.errstate(all="ignore")
def converted(x: np.ndarray, dtype: Any) -> np.ndarray | None:
    """x in another dtype, as XLA converts it.

    A float becomes the integer towards zero of it, the nearest that the dtype has, and
    0 for NaN. An integer too wide for an integer dtype wraps around.
    """
    if not is_known(dtype):
        return None
    if _is_boolean(dtype):
        return x != 0
    if _is_integer(dtype) and _is_float(x.dtype):
        return _saturated(x.astype(np.float64), np.dtype(dtype))
    return x.astype(dtype)


def _saturated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    limits = np.iinfo(dtype)
    # The largest 64-bit integers are no floats, so that what reaches them is chosen.
    below, above = x <= float(limits.min), x >= float(limits.max)
    inside = np.where(below | above | np.isnan(x), 0.0, x).astype(dtype)
    edge = np.where(below, dtype.type(limits.min), dtype.type(limits.max))
    return np.where(below | above, edge, inside)


def _is_boolean(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _is_integer(dtype: Any) -> bool:
    # NumPy's own only: those of four bits are of another kind.
    return jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).kind in "iu"


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


# --- operations -----------------------------------------------------------------------

_Operation = Callable[..., Any]  # takes parameters, then operands


def _plain(f: Callable[..., Any]) -> _Operation:
    return lambda _, *operands: f(*operands)


def _rounded(f: Callable[..., Any]) -> _Operation:
    """An elementary function of floats, rounded once."""

    def operation(_: Any, *operands: np.ndarray) -> np.ndarray:
        wide = (x.astype(np.float64) for x in operands)
        return np.asarray(f(*wide)).astype(operands[0].dtype)

    return operation


def _division(floats: Callable[..., Any], by_zero: Callable[..., Any]) -> _Operation:
    """A quotient or remainder; of integers it is that of C."""

    def operation(_: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if not _is_integer(x.dtype):
            return floats(x, y)
        rest = np.fmod(x, np.where(y == 0, np.ones_like(y), y))
        if floats is np.fmod:
            return np.where(y == 0, by_zero(x), rest)
        whole = np.floor_divide(x - rest, np.where(y == 0, np.ones_like(y), y))
        return np.where(y == 0, by_zero(x), whole)

    return operation


def _integer_power(params: Any, x: np.ndarray) -> np.ndarray | None:
    y = params["y"]
    if not _is_integer(x.dtype):
        return (x.astype(np.float64) ** y).astype(x.dtype)
    return None if y < 0 else np.power(x, np.asarray(y, x.dtype))


def _selected(_: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    if _is_boolean(which.dtype):
        return np.where(which, cases[-1], cases[0])
    if not ((which >= 0) & (which < len(cases))).all():
        return None
    return np.select([which == i for i in range(len(cases))], list(cases))


def _shift(f: Callable[..., Any], signed: bool) -> _Operation:
    """A shift; by as many bits as there are, or more, copies of the sign, or 0 remain.

    The amount is unsigned, as in XLA.
    """

    def operation(_: Any, x: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * x.dtype.itemsize
        kind = np.dtype(f"{'i' if signed else 'u'}{x.dtype.itemsize}")
        beyond = (by < 0) | (by >= bits)
        amount = np.where(beyond, bits - 1, by).astype(kind)
        shifted = f(x.astype(kind), amount).astype(x.dtype)
        return shifted if signed else np.where(beyond, np.zeros_like(x), shifted)

    return operation


_OPERATIONS: dict[str, _Operation] = {
    "abs": _plain(np.abs),
    "add": _plain(np.add),
    "and": _plain(np.bitwise_and),
    "ceil": _plain(np.ceil),
    "clamp": _plain(lambda low, x, high: np.minimum(np.maximum(low, x), high)),
    "convert_element_type": lambda params, x: converted(x, params["new_dtype"]),
    "copy": _plain(np.asarray),
    "div": _division(np.divide, lambda x: ~np.zeros_like(x)),
    "eq": _plain(np.equal),
    "erf": _rounded(special.erf),
    "erfc": _rounded(special.erfc),
    "exp": _rounded(np.exp),
    "exp2": _rounded(np.exp2),
    "expm1": _rounded(np.expm1),
    "floor": _plain(np.floor),
    "ge": _plain(np.greater_equal),
    "gt": _plain(np.greater),
    "integer_pow": _integer_power,
    "is_finite": _plain(np.isfinite),
    "le": _plain(np.less_equal),
    "log": _rounded(np.log),
    "log1p": _rounded(np.log1p),
    "logistic": _rounded(special.expit),
    "lt": _plain(np.less),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "mul": _plain(np.multiply),
    "ne": _plain(np.not_equal),
    "neg": _plain(np.negative),
    "not": _plain(np.invert),
    "or": _plain(np.bitwise_or),
    "pow": _rounded(np.power),
    "pvary": _plain(np.asarray),
    "rem": _division(np.fmod, lambda x: x),
    "rsqrt": _rounded(lambda x: 1 / np.sqrt(x)),
    "select_n": _selected,
    "shift_left": _shift(np.left_shift, signed=False),
    "shift_right_arithmetic": _shift(np.right_shift, signed=True),
    "shift_right_logical": _shift(np.right_shift, signed=False),
    "sign": _plain(np.sign),
    "sqrt": _rounded(np.sqrt),
    "square": _plain(lambda x: np.multiply(x, x)),
    "sub": _plain(np.subtract),
    "tanh": _rounded(np.tanh),
    "xor": _plain(np.bitwise_xor),
}
