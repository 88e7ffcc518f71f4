"""Which activation a group of elementwise equations computes, however it is spelled.

The group is evaluated on some points and compared with each activation that kernels
know, in float64 and in the dtypes that the program has. So every spelling is found, and
nothing that only looks like one: functions are equal at zeros, infinities, NaN and the
smallest and largest numbers too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from tracea_jax.ops.common.exact import ACTIVATIONS_F64
from tracea_jax.rewrite.evaluate import apply, converted, is_elementwise
from tracea_jax.rewrite.product import DTYPES, only_rounds
from tracea_jax.rewrite.view import OUTPUT, Equation, View

MAX_EQUATIONS = 24  # gelu spelled out in bfloat16 with a conversion at every step

# Constants of activations: a 16-bit program has them rounded.
_CONSTANTS = (0.044715, np.sqrt(2 / np.pi), np.sqrt(0.5), np.sqrt(2.0), np.log2(np.e))
_TOLERANCE = 1e-5  # the forms of gelu differ by 5e-4
# Spellings of gelu and silu cancel in the negative tail, by this times the argument.
_CANCELLED = 4 * float(np.finfo(np.float64).eps)
_TAIL = 100.0  # beyond it they are exact

# Near zero and far out too: what is clamped there is another function.
_FAR = np.concatenate([10.0 ** np.arange(-45, 39), [2.0**-149, 2.0**-126, 3e38]])
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan]
_X = np.concatenate([np.linspace(-12, 12, 49), [-0.3, 0.3], _FAR, -_FAR, _SPECIAL])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """An activation of a value.

    Attributes:
      name: one of ``problem.ACTIVATIONS``.
      root: index of the equation with the result.
      equations: indices of all that belong to it, the root included.
    """

    name: str
    root: int
    equations: frozenset[int]


def activation_of(view: View, var: Any) -> Activated | None:
    """The activation that all uses of a value belong to, if there is one.

    Args:
      view: the equations.
      var: the value before the activation.
    """
    consumers = view.consumers(var)
    if not consumers or not _may_belong(view.eqns[consumers[0]]):
        return None
    dtype = var.aval.dtype
    steps: list[_Step] = []
    slots = {var: 0}
    inside: list[int] = []
    users = set(consumers)  # of all values inside
    while users and len(steps) < MAX_EQUATIONS:
        index = min(users)
        if index == OUTPUT or index in view.taken:
            return None
        step = _step(view, index, slots)
        if step is None:
            return None
        users.remove(index)
        steps.append(step)
        inside.append(index)
        name = None if users else _recognise(tuple(steps), dtype)
        if name is not None:
            return Activated(name=name, root=index, equations=frozenset(inside))
        result = view.eqns[index].outvars[0]
        slots[result] = len(steps)
        users.update(view.consumers(result))
    return None


# --- elementwise equations, evaluated ------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Constant:
    """A number in the program.

    Attributes:
      bits: it, as ``float.hex`` writes it: 0.0 and -0.0 are two constants.
      dtype: of it.
    """

    bits: str
    dtype: Any

    @property
    def value(self) -> float:
        return float.fromhex(self.bits)

    @property
    def meant(self) -> float:
        """The number before it was rounded."""
        return _unrounded(self.dtype).get(self.value, self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One equation.

    Attributes:
      name: its primitive's.
      parameters: of it, as far as values depend on them.
      operands: constants, and numbers of earlier steps; the argument's is 0.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...]
    operands: tuple[_Constant | int, ...]


def _step(view: View, index: int, slots: dict[Any, int]) -> _Step | None:
    eqn: Any = view.eqns[index]
    name, result = eqn.primitive.name, eqn.outvars[0].aval
    if name == "convert_element_type" and not _is_harmless(eqn):
        return None
    operands: list[_Constant | int] = []
    for atom in eqn.invars:
        aval = atom.aval
        slot = None if isinstance(atom, Literal) else slots.get(atom)
        if slot is not None and aval.shape == result.shape:
            operands.append(slot)
        elif (value := view.scalar(atom)) is not None:
            operands.append(_Constant(value.hex(), aval.dtype))
        else:
            return None
    if is_jax_relu(eqn):
        return _Step("max", (), (*operands, _Constant((0.0).hex(), result.dtype)))
    if not is_elementwise(eqn):
        return None
    parameters = {k: v for k, v in eqn.params.items() if k in ("y", "new_dtype")}
    return _Step(name, tuple(sorted(parameters.items())), tuple(operands))


def _may_belong(eqn: Equation) -> bool:
    return is_elementwise(eqn) or is_jax_relu(eqn)


def _is_harmless(eqn: Equation) -> bool:
    """Returns whether a conversion is between floats of kernels, or of a comparison."""
    old, new = eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name
    return (
        only_rounds(eqn)
        and "float64" not in (old, new)
        or (old == "bool" and new in DTYPES)
    )


@functools.lru_cache(maxsize=1024)
def _recognise(steps: tuple[_Step, ...], dtype: Any) -> str | None:
    """The activation that the steps are of an argument of this dtype."""
    ideal = _evaluated(steps, _X)
    rounded = converted(_X, dtype)
    if ideal is None or rounded is None:
        return None
    for name, function in ACTIVATIONS_F64.items():
        with np.errstate(all="ignore"):
            if name == "none" or not _are_equal(name, ideal, function(_X)):
                continue
            actual = _evaluated(steps, rounded)
            expected = function(rounded.astype(np.float64))
            if actual is not None and _have_one_range(name, actual, expected):
                return name
    return None


def _are_equal(name: str, values: np.ndarray, expected: np.ndarray) -> bool:
    """True if values in float64 are an activation's but for constants' roundings."""
    tail = np.minimum(np.abs(_X), _TAIL)
    bound = _TOLERANCE * np.abs(expected) + _CANCELLED * tail
    if name == "relu":  # no spelling of it rounds
        return bool(np.all(_are_same(values, expected) & _have_same_signs(values)))
    near = np.abs(values - expected) <= bound
    return bool(np.all(near | _are_same(values, expected)))


def _have_same_signs(values: np.ndarray) -> np.ndarray:
    """Places where relu gives no negative zero; zeros may have either sign."""
    return ~(np.signbit(values) & (values == 0)) | (_X == 0)


def _have_one_range(name: str, actual: np.ndarray, expected: np.ndarray) -> bool:
    """True if values overflow, vanish and are no numbers where an activation's do.

    In the program's dtypes: a factor that overflows is no rounding. The sizes of those
    in between are judged in float64, where spellings do not cancel; relu's here too.
    """
    rounded = converted(expected, actual.dtype)
    assert rounded is not None
    if name == "relu":
        return bool(_are_same(actual, rounded).all())
    unclear = np.isfinite(actual) & np.isfinite(rounded)
    return bool(np.all(unclear | _are_same(actual, rounded)))


def _are_same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x == y) | (np.isnan(x) & np.isnan(y))


def _evaluated(steps: tuple[_Step, ...], x: np.ndarray) -> np.ndarray | None:
    """The last step's value: for x in float64 with the constants that were meant.

    There, conversions between floats change nothing.
    """
    ideal = x.dtype == np.float64
    values: list[np.ndarray] = [x]
    for step in steps:
        operands = []
        for operand in step.operands:
            if isinstance(operand, int):
                operands.append(values[operand])
            elif ideal and operand.dtype != bool:
                operands.append(np.asarray(operand.meant))
            else:
                operands.append(np.asarray(operand.value).astype(operand.dtype))
        parameters = dict(step.parameters)
        if ideal and "new_dtype" in parameters:
            parameters["new_dtype"] = np.dtype(np.float64)
        value = apply(step.name, parameters, *operands)
        if value is None:
            return None
        values.append(np.broadcast_to(value, x.shape))
    return values[-1]


@functools.cache
def _unrounded(dtype: Any) -> dict[float, float]:
    """The constants of activations by what they are rounded to the dtype."""
    return {float(np.asarray(c).astype(dtype)): float(c) for c in _CONSTANTS}


# --- jax.nn.relu ----------------------------------------------------------------------


def is_jax_relu(eqn: Equation) -> bool:
    """Returns whether this is a call of ``jax.nn.relu``, its derivative rule included.

    A function of somebody else with the same values may have another derivative, such
    as guided backpropagation's; what tells them apart is where they are defined.
    """
    return (
        eqn.primitive.name == "custom_jvp_call"
        and len(eqn.invars) == 1
        and _defined_at(eqn) == _relu_defined_at()
    )


def _defined_at(eqn: Equation) -> str | None:
    jaxpr = eqn.params["call_jaxpr"]
    info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
    return getattr(info, "func_src_info", None)


@functools.cache
def _relu_defined_at() -> str | None:
    x = jax.ShapeDtypeStruct((), jnp.float32)
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(x).eqns
    return _defined_at(eqn)
