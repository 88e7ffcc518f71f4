"""Scales and shifts in a row: batch norms, given their statistics.

    relu((x - mean) * (rsqrt(variance + epsilon) * scale) + bias)

What computes the statistics stays as it is. Only rows of three steps and more pay, as
the gradients of one scale and one shift are two sums already. Norms of each image, such
as group norms, are left: where sums keep two dimensions, XLA was seen to take twice as
long on an H100 for both sums at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.ops.channel_affine.primitive import bind
from tracea_jax.ops.channel_affine.steps import SCALES, Result
from tracea_jax.options import local_device
from tracea_jax.rewrite.activation import is_jax_relu
from tracea_jax.rewrite.channel_sums import narrow
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View

_FEWEST = 3  # steps
_SHARED = 16  # entries that share the operands of a row, at least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAffineSite:
    """A call of ``channel_affine_p``.

    Attributes:
      result: the steps, and what is done to their result.
      shapes: of their operands, as the primitive takes them.
    """

    result: Result
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, x: Any, source: Any, *operands: Any) -> Any:
        pairs = zip(operands, self.shapes, strict=True)
        each = (c.reshape(shape) for c, shape in pairs)
        return bind(x, source, *each, result=self.result)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that an equation is.

    Attributes:
      name: of ``STEPS``.
      value: what it is a step of.
      operand, shape: its other operand, and the shape that this has with all
        dimensions of the value.
    """

    name: str
    value: Atom
    operand: Atom
    shape: tuple[int, ...]


def match_channel_affine(view: View, index: int) -> Match | None:
    """The longest row of steps that begins with an equation."""
    first, result = _step_at(view, view.eqns[index]), view.eqns[index].outvars[0].aval
    if first is None or result.dtype.name not in DTYPES or result.weak_type:
        return None
    steps, equations = [first], [index]
    while True:
        value = view.eqns[equations[-1]].outvars[0]
        following = view.sole_consumer(value)
        if following is None:
            break
        step = _step_at(view, view.eqns[following], value)
        if step is None:
            break
        steps.append(step)
        equations.append(following)
    while steps and not _are_in_order(steps):
        steps, equations = steps[:-1], equations[:-1]
    if len(steps) < _FEWEST or _shared(steps) < _SHARED:
        return None
    if all(step.name not in SCALES for step in steps) or not _are_of_channels(steps):
        return None
    source = narrow(view, first.value)
    dtype, activation = _extend(view, equations, source.aval.dtype.name)
    names = tuple(step.name for step in steps)
    site = ChannelAffineSite(
        result=Result(steps=names, dtype=dtype, activation=activation),
        shapes=tuple(step.shape for step in steps),
    )
    return Match(
        root=equations[-1],
        equations=frozenset(equations),
        operands=(first.value, source, *(step.operand for step in steps)),
        site=site,
    )


def _extend(view: View, equations: list[int], dtype: str) -> tuple[str | None, str]:
    """Takes a conversion to a dtype and a relu after the steps, if they are there.

    Returns:
      The dtype, or None if the result keeps that of the steps; the activation.
    """
    result = view.eqns[equations[-1]].outvars[0]
    rounded = None
    if result.aval.dtype != dtype:
        following = view.sole_consumer(result)
        if following is None or not _converts(view.eqns[following], dtype):
            return None, "none"
        equations.append(following)
        rounded = dtype
    following = view.sole_consumer(view.eqns[equations[-1]].outvars[0])
    if following is None or not is_jax_relu(view.eqns[following]):
        return rounded, "none"
    equations.append(following)
    return rounded, "relu"


def _converts(eqn: Equation, dtype: str) -> bool:
    name, result = eqn.primitive.name, eqn.outvars[0].aval
    return name == "convert_element_type" and result.dtype == dtype


CHANNEL_AFFINE = Rule(
    op="channel_affine",
    anchors=frozenset({"add", "sub", "mul", "div"}),
    match=match_channel_affine,
    is_expected=False,  # most sums and products are of no norm
)


def _are_in_order(steps: list[_Step]) -> bool:
    """Whether no shift is between two scales.

    Sums of entries before a scale would follow from those before another one, but with
    less digits where what is between takes a mean away.
    """
    places = [i for i, step in enumerate(steps) if step.name in SCALES]
    return not places or len(places) == places[-1] - places[0] + 1


def _are_of_channels(steps: list[_Step]) -> bool:
    """Whether operands vary along one dimension: the last one, where that was timed."""
    dims = {d for step in steps for d, n in enumerate(step.shape) if n != 1}
    last = steps[0].value.aval.ndim - 1
    return len(dims) == 1 and (last in dims or local_device().platform == "cpu")


def _shared(steps: list[_Step]) -> int:
    """How many entries of the value have the same operands."""
    shape = steps[0].value.aval.shape
    alike = [all(s.shape[d] == 1 for s in steps) for d in range(len(shape))]
    return math.prod(n for n, is_alike in zip(shape, alike, strict=True) if is_alike)


def _step_at(view: View, eqn: Equation, value: Atom | None = None) -> _Step | None:
    """The step of a value that an equation is; of either operand, if none is given."""
    name = eqn.primitive.name
    if name not in CHANNEL_AFFINE.anchors:
        return None
    shape, dtype = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
    for place, x in enumerate(eqn.invars):
        other = eqn.invars[1 - place]
        if x.aval.shape != shape or (value is not None and x is not value):
            continue
        if name == "div" and place == 1:
            continue
        found = _spread(view, other, shape)
        if found is None or found[0].aval.dtype != dtype:
            continue
        named = "rsub" if name == "sub" and place == 1 else name
        return _Step(name=named, value=x, operand=found[0], shape=found[1])
    return None


def _spread(
    view: View, atom: Atom, shape: tuple[int, ...]
) -> tuple[Atom, tuple[int, ...]] | None:
    """What a value is broadcast from, and its shape with all dimensions.

    None if it is a number, or as large as the result.
    """
    places = list(range(atom.aval.ndim))
    eqn = view.producer(atom, "broadcast_in_dim")
    if eqn is not None and len(eqn.invars) == 1:
        atom = eqn.invars[0]
        places = [int(i) for i in eqn.params["broadcast_dimensions"]]
    elif atom.aval.ndim != len(shape):
        return None
    if atom.aval.size in (1, math.prod(shape)):
        return None
    sizes = dict(zip(places, atom.aval.shape, strict=True))
    return atom, tuple(sizes.get(d, 1) for d in range(len(shape)))
