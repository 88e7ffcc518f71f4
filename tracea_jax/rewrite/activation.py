"""Which activation a group of elementwise equations computes, however it is spelled.

The group is evaluated in float64 on some points and compared with each activation that
kernels know. So every spelling is found, and nothing that only looks like one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from scipy import special

from tracea_jax.ops.exact import ACTIVATIONS_F64
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import OUTPUT, Equation, View

MAX_EQUATIONS = 24  # gelu spelled out in bfloat16 with a conversion at every step

# Constants of activations: a 16-bit program has them rounded.
_CONSTANTS = (0.044715, np.sqrt(2 / np.pi), np.sqrt(0.5), np.sqrt(2.0))
_TOLERANCE = 1e-5  # the forms of gelu differ by 5e-4

# Far out too: what is clamped there is another function.
_FAR = 10.0 ** np.arange(-30, 31)
_X = np.concatenate([np.linspace(-12, 12, 49), [0.0, -0.3, 0.3], _FAR, -_FAR])


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
    if not consumers or view.eqns[consumers[0]].primitive.name not in _OPERATIONS:
        return None
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
        if not users and (name := _recognise(tuple(steps))) is not None:
            return Activated(name=name, root=index, equations=frozenset(inside))
        result = view.eqns[index].outvars[0]
        slots[result] = len(steps)
        users.update(view.consumers(result))
    return None


# --- elementwise equations, evaluated in float64 --------------------------------------


# Name and parameter of an operation, and its operands: (is a slot, slot or number).
_Step = tuple[str, Any, tuple[tuple[bool, float], ...]]


def _step(view: View, index: int, slots: dict[Any, int]) -> _Step | None:
    eqn: Any = view.eqns[index]
    name = eqn.primitive.name
    if name not in _OPERATIONS or (name == "custom_jvp_call" and not is_jax_relu(eqn)):
        return None
    if name == "convert_element_type" and not _only_rounds(eqn):
        return None
    result = eqn.outvars[0].aval
    operands = []
    for atom in eqn.invars:
        aval = atom.aval
        slot = None if isinstance(atom, Literal) else slots.get(atom)
        if slot is not None and aval.shape == result.shape:
            operands.append((True, slot))
        elif (value := view.scalar(atom)) is not None:
            operands.append((False, _unrounded(value, aval.dtype)))
        else:
            return None
    return name, eqn.params.get("y"), tuple(operands)


def _only_rounds(eqn: Equation) -> bool:
    """Whether a conversion is between floats of kernels, or of a comparison."""
    old, new = eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name
    return new in DTYPES and old in (*DTYPES, "bool")


@functools.lru_cache(maxsize=1024)
def _recognise(steps: tuple[_Step, ...]) -> str | None:
    with np.errstate(all="ignore"):
        values = _evaluate(steps, _X)
    for name, function in ACTIVATIONS_F64.items():
        expected = function(_X)
        bound = _TOLERANCE * (1e-3 + np.abs(expected))
        if name != "none" and np.all(np.abs(values - expected) <= bound):
            return name
    return None


def _evaluate(steps: tuple[_Step, ...], x: np.ndarray) -> np.ndarray:
    values: list[Any] = [x]
    for name, parameter, atoms in steps:
        operands = [values[int(v)] if is_slot else v for is_slot, v in atoms]
        result = _OPERATIONS[name](parameter, *operands)
        values.append(np.broadcast_to(result, x.shape))
    return values[-1]


@functools.lru_cache(maxsize=1024)
def _unrounded(value: float, dtype: Any) -> float:
    """The constant that was meant, if this is one rounded to the dtype."""
    for constant in _CONSTANTS:
        if value == float(np.asarray(constant).astype(dtype)):
            return float(constant)
    return value


def _select(_: Any, which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which).astype(int), [np.asarray(c) for c in cases])


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda _, x: np.abs(x),
    "add": lambda _, x, y: x + y,
    "convert_element_type": lambda _, x: x,
    "copy": lambda _, x: x,
    "custom_jvp_call": lambda _, x: np.maximum(x, 0),  # jax.nn.relu
    "div": lambda _, x, y: x / y,
    "erf": lambda _, x: special.erf(x),
    "erfc": lambda _, x: special.erfc(x),
    "exp": lambda _, x: np.exp(x),
    "ge": lambda _, x, y: np.greater_equal(x, y),
    "gt": lambda _, x, y: np.greater(x, y),
    "integer_pow": lambda y, x: x**y,
    "le": lambda _, x, y: np.less_equal(x, y),
    "logistic": lambda _, x: special.expit(x),
    "lt": lambda _, x, y: np.less(x, y),
    "max": lambda _, x, y: np.maximum(x, y),
    "min": lambda _, x, y: np.minimum(x, y),
    "mul": lambda _, x, y: x * y,
    "neg": lambda _, x: -np.asarray(x),
    "pow": lambda _, x, y: np.power(x, y),
    "select_n": _select,
    "square": lambda _, x: x * x,
    "sub": lambda _, x, y: x - y,
    "tanh": lambda _, x: np.tanh(x),
}


# --- jax.nn.relu ----------------------------------------------------------------------


def is_jax_relu(eqn: Equation) -> bool:
    """Whether this is a call of ``jax.nn.relu``, its derivative rule included.

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
