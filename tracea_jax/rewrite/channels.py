"""Steps on each channel of a convolution's result: batch norm, bias, scale.

Steps that add, subtract, multiply or divide by one number a channel, in any order, make
y * scale + shift. The scale can be part of the weights, the shift is a bias.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: y + c, y - c, c - y, y * c or y / c.

    Attributes:
      name: "add", "sub", "rsub", "mul" or "div".
      number: c if it is known; None if it is the site's next operand, of one entry a
        channel or one for all.
      bits: of the number: steps with 0.0 and with -0.0 are two.
    """

    name: str
    number: float | None = dataclasses.field(default=None, compare=False)
    bits: str | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        bits = None if self.number is None else float(self.number).hex()
        object.__setattr__(self, "bits", bits)

    @property
    def scales(self) -> bool:
        """Returns whether y is multiplied, by -1 at least."""
        return self.name not in ("add", "sub")

    @property
    def keeps_precision(self) -> bool:
        """Returns whether weights that have the factor of y need no more digits."""
        return not self.scales or self.name == "rsub" or self.number == -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Places of the channels of a value.

    Attributes:
      axis: their dimension; None where they share one with others, or there is one.
      count: how many there are.
    """

    axis: int | None
    count: int

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> Channels:
        """Places after a reshape that keeps the order in memory."""
        places = [
            i
            for i, size in enumerate(new)
            if self.axis is not None
            and size == self.count != 1
            and math.prod(new[:i]) == math.prod(old[: self.axis])
        ]
        return dataclasses.replace(self, axis=places[0] if places else None)


def step_at(
    view: View, eqn: Equation, value: Any, channels: Channels
) -> tuple[Step, Atom | None] | None:
    """The step that an equation does to a value, with its operand.

    None if it is no such step; the operand is None if it is a known number.
    """
    name = {"add_any": "add"}.get(eqn.primitive.name, eqn.primitive.name)
    if name == "neg":
        return Step(name="mul", number=-1.0), None
    if name not in ("add", "sub", "mul", "div"):
        return None
    first, second = eqn.invars
    if second is value:
        if name == "div":
            return None
        first, second = second, first
        name = "rsub" if name == "sub" else name
    if eqn.outvars[0].aval.shape != value.aval.shape:
        return None
    number = view.scalar(second)
    if number is not None:
        step = Step(name=name, number=number)
        return (step, None) if math.isfinite(number) else None
    operand = one_a_channel(view, second, value.aval.shape, channels)
    return None if operand is None else (Step(name=name), operand)


def one_a_channel(
    view: View, atom: Atom, shape: Sequence[int], channels: Channels
) -> Atom | None:
    """The entries that a value of this shape is broadcast from, if one a channel.

    Its size is 1 or the number of channels.
    """
    places = list(range(atom.aval.ndim))
    if (turned := view.producer(atom, "transpose")) is not None:
        order = [int(i) for i in turned.params["permutation"]]
        atom, places = turned.invars[0], [order.index(i) for i in places]
    eqn = view.producer(atom, "broadcast_in_dim")
    if eqn is not None and len(eqn.invars) == 1:
        spread = [int(i) for i in eqn.params["broadcast_dimensions"]]
        atom, places = eqn.invars[0], [places[i] for i in spread]
    elif atom.aval.ndim not in (0, len(shape)):
        return None
    sizes = dict(zip(places, atom.aval.shape, strict=True))
    varies = {place for place, size in sizes.items() if size != 1}
    return atom if varies <= {channels.axis} else None


def scale_and_shift(
    steps: Sequence[Step], operands: Sequence[Any], count: int
) -> tuple[Any, Any]:
    """(scale, shift) of steps, of shape (count,), float32; None where there is none.

    A shift that is one operand keeps its dtype.
    """
    rest = iter(operands)
    values: list[Any] = [next(rest) if s.number is None else s.number for s in steps]
    if [s.name for s in steps] == ["add"] and steps[0].number is None:
        return None, _each(values[0], count)
    scale, shift = None, None
    for step, c in zip(steps, values, strict=True):
        if step.number is None:
            c = _each(c.astype(jnp.float32), count)
        scale, shift = _after(step.name, c, scale, shift)
    return _filled(scale, count), _filled(shift, count)


def _filled(x: Any, count: int) -> Any:
    return jnp.full(count, x, jnp.float32) if isinstance(x, float) else x


def _after(name: str, c: Any, scale: Any, shift: Any) -> tuple[Any, Any]:
    """Scale and shift after one more step; None stands for 1 and for 0."""
    if name == "mul":
        scale = c if scale is None else scale * c
        return scale, None if shift is None else shift * c
    if name == "div":
        scale = (1.0 if scale is None else scale) / c
        return scale, None if shift is None else shift / c
    if name == "rsub":
        scale = -1.0 if scale is None else -scale
        shift = None if shift is None else -shift
    elif name == "sub":
        c = -c
    return scale, c if shift is None else shift + c


def _each(value: Any, count: int) -> Any:
    """The entries as a vector of one for each channel."""
    return jnp.broadcast_to(value.reshape(-1), (count,))
