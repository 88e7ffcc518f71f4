"""Equations between the kernels: functions of each element, and reductions.

    mapped(eqn) -> the step's fields, for a function of each element
    reduced(eqn) -> the same of a sum, a maximum or a minimum

Each is a step of its own, unlike in XLA, which fuses them: a bundle needs them for what
is small beside its products, such as a layer norm. Functions are those of C on a CPU
(``kernels/capi/pointwise.cc``) and of CUDA on a GPU (``emit.pointwise``).
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from tracea_jax.bundle.arrays import inner_of

DTYPES = ("float32", "bfloat16", "float64", "bool")

# Primitives of jax.lax, by the function's name; most are called alike.
_FUNCTIONS = {
    **{name: name for name in "add sub mul div rem pow max min neg abs sign".split()},
    **{name: name for name in "gt ge lt le eq ne is_finite floor ceil".split()},
    **{name: name for name in "square integer_pow sqrt rsqrt cbrt clamp".split()},
    **{name: name for name in "exp exp2 expm1 log log1p logistic erf erfc".split()},
    **{name: name for name in "sin cos tan asin acos atan atan2".split()},
    **{name: name for name in "sinh cosh tanh asinh acosh atanh".split()},
    "add_any": "add",
    "convert_element_type": "convert",
    "select_n": "select",
}
# The same of booleans alone; of integers, these work on bits.
_OF_BOOLEANS = {"not": "not", "and": "min", "or": "max", "xor": "ne"}
_ROUNDED = {
    lax.RoundingMethod.TO_NEAREST_EVEN: "rint",
    lax.RoundingMethod.AWAY_FROM_ZERO: "round",
}
COPY = {"function": "convert", "exponent": 0}
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",  # of booleans: there are no integers here
    "reduce_or": "max",
}


def mapped(eqn: Any) -> dict[str, Any] | None:
    """The manifest's step for an elementwise function; None for anything else."""
    name = _function(eqn)
    if name is None or not _has_dtypes(eqn):
        return None
    shape = eqn.outvars[0].aval.shape
    if any(x.aval.shape and len(x.aval.shape) != len(shape) for x in eqn.invars):
        return None
    if 0 in shape and any(repeated(x, eqn) is None for x in eqn.invars):
        return None
    if name == "select" and len(eqn.invars) != 3:
        return None
    return {"function": name, "exponent": int(eqn.params.get("y", 0))}


def _function(eqn: Any) -> str | None:
    name = eqn.primitive.name
    if name == "round":
        return _ROUNDED[eqn.params["rounding_method"]]
    if name in _OF_BOOLEANS:
        are_booleans = all(x.aval.dtype.name == "bool" for x in eqn.invars)
        return _OF_BOOLEANS[name] if are_booleans else None
    return _FUNCTIONS.get(name)


def repeated(operand: Any, eqn: Any) -> int | None:
    """Repetitions of an operand's elements in a row, in the result's shape.

    Dimensions of one element count as those of the result. None if ``arrays.Spread``
    cannot say it: then a copy has to be made.
    """
    shape, out = operand.aval.shape, eqn.outvars[0].aval.shape
    return inner_of(shape, range(len(shape)), out)


def reduced(eqn: Any) -> dict[str, Any] | None:
    """The manifest's step for a reduction of an array in ``order_to_reduce``."""
    name = _REDUCTIONS.get(eqn.primitive.name)
    if name is None or not _has_dtypes(eqn):
        return None
    shape, axes = eqn.invars[0].aval.shape, sorted(eqn.params["axes"])
    if not axes or 0 in shape:
        return None
    if (order := order_to_reduce(eqn)) is not None:
        shape = [shape[axis] for axis in order]
        axes = range(len(shape) - len(axes), len(shape))
    return {
        "function": name,
        "outer": math.prod(shape[: axes[0]]),
        "reduced": math.prod(shape[axes[0] : axes[-1] + 1]),
        "inner": math.prod(shape[axes[-1] + 1 :]),
    }


def order_to_reduce(eqn: Any) -> tuple[int, ...] | None:
    """The dimensions with those last that are reduced; None if these are in a row."""
    rank, axes = eqn.invars[0].aval.ndim, sorted(eqn.params["axes"])
    if axes == list(range(axes[0], axes[-1] + 1)):
        return None
    return (*(axis for axis in range(rank) if axis not in axes), *axes)


def _has_dtypes(eqn: Any) -> bool:
    arrays = (*eqn.invars, *eqn.outvars)
    return all(x.aval.dtype.name in DTYPES for x in arrays)
