"""Which scales of a convolution's result its weights may have instead.

conv(x, w) * s equals conv(x, w * s) but for rounding only if neither s nor w * s is
zero by underflow, infinite or NaN. A zero in a divisor, for one, makes every entry of a
channel NaN (sums of infinities) where the program has infinities. So a scale must be

    a number or a captured array that is of moderate size, or
    that of a batch norm, g / sqrt(v + epsilon) with a known epsilon.

Of a batch norm this supposes what one is: variances are not negative, so the root is
finite, and products of g and weights are within the range of float32.
"""

from __future__ import annotations

import math

import numpy as np
from jax.extend.core import Literal

from tracea_jax.rewrite.channels import Step
from tracea_jax.rewrite.view import Atom, Equation, View

# Products with weights and results keep clear of both ends of bfloat16's range.
_SMALLEST, _LARGEST = 2.0**-20, 2.0**20
# The smallest epsilon that is no guard against a division by zero alone.
_EPSILON = 1e-12

_TRANSPARENT = frozenset(
    """broadcast_in_dim convert_element_type copy reshape squeeze transpose""".split()
)


def may_be_in_weights(view: View, step: Step, operand: Atom | None) -> bool:
    """True if y * c or y / c is, whatever y is, a convolution with scaled weights."""
    if not step.scales or step.name == "rsub":
        return True
    if operand is None:
        assert step.number is not None
        return _are_moderate(np.asarray(step.number))
    value = view.constant(operand)
    if value is not None:
        return _are_moderate(value)
    return normalises(view, step, operand)


def normalises(view: View, step: Step, operand: Atom | None) -> bool:
    """True if a step divides by the root of a variance with an epsilon, as a norm."""
    if operand is None or step.name not in ("mul", "div"):
        return False
    return _has_root(view, operand, inverse=step.name == "mul")


def _are_moderate(value: np.ndarray) -> bool:
    """Returns whether all are of moderate size.

    Zero is not: y * 0 has the sign of y, and a sum of products with zeros has none.
    """
    size = np.abs(value.astype(np.float64))
    return bool(np.all((size >= _SMALLEST) & (size <= _LARGEST)))


def _has_root(view: View, atom: Atom, *, inverse: bool) -> bool:
    """Returns whether a value is sqrt(v + epsilon), or a product with its inverse."""
    view, eqn = _made(view, atom)
    if eqn is None:
        return False
    name, operands = eqn.primitive.name, eqn.invars
    if name == ("rsqrt" if inverse else "sqrt"):
        return _has_epsilon(view, operands[0])
    if name == "pow":
        power = view.scalar(operands[1])
        return power == (-0.5 if inverse else 0.5) and _has_epsilon(view, operands[0])
    if not inverse:
        return False
    if name == "mul":
        return any(_has_root(view, x, inverse=True) for x in operands)
    return name == "div" and _has_root(view, operands[1], inverse=False)


def _has_epsilon(view: View, atom: Atom) -> bool:
    """Returns whether a value is one plus a known number that is well above zero."""
    view, eqn = _made(view, atom)
    if eqn is None or eqn.primitive.name != "add":
        return False
    numbers = [view.scalar(x) for x in eqn.invars]
    return any(n is not None and _EPSILON <= n < math.inf for n in numbers)


def _made(view: View, atom: Atom) -> tuple[View, Equation | None]:
    """The equation that computes a value's entries, and where it is."""
    while True:
        eqn = view.producer(atom)
        if eqn is not None and eqn.primitive.name in _TRANSPARENT:
            atom = eqn.invars[0]
        elif eqn is None and not isinstance(atom, Literal) and atom in view.outside:
            view, atom = view.outside[atom]
        else:
            return view, eqn
