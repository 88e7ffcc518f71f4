"""Scales and shifts in a row: batch norms, given their statistics.

    relu((x - mean) * (rsqrt(variance + epsilon) * scale) + bias + residual)

What computes the statistics stays as it is. Only rows of three steps and more pay, as
the gradients of one scale and one shift are two sums already. Norms of each image, such
as group norms, are left: where sums keep two dimensions, XLA was seen to take twice as
long on an H100 for both sums at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.ops.channel_affine.fork import fork_p
from tracea_jax.ops.channel_affine.primitive import bind
from tracea_jax.ops.channel_affine.steps import SCALES, Result
from tracea_jax.options import planned_device
from tracea_jax.rewrite.activation import is_jax_relu
from tracea_jax.rewrite.channel_sums import narrow, powers
from tracea_jax.rewrite.match import Match, Rule, Viewed
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import OUTPUT, Atom, Equation, View, is_static

_FEWEST = 3  # steps
_MOST = 16  # of which norms have five: rows are read from each of their steps on
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

    def __call__(self, x: Any, source: Any, *others: Any) -> Any:
        pairs = zip(others, self.shapes, strict=False)
        each = (c.reshape(shape) for c, shape in pairs)
        residual = others[len(self.shapes) :]
        return bind(x, source, *each, *residual, result=self.result)


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
    if not is_static(result):
        return None
    steps, equations = [first], [index]
    while (following := _following(view, equations)) is not None:
        value = view.eqns[equations[-1]].outvars[0]
        step = _step_at(view, view.eqns[following], value)
        if step is None or len(steps) == _MOST or not _are_in_order([*steps, step]):
            break
        steps.append(step)
        equations.append(following)
    if len(steps) < _FEWEST or _shared(steps) < _SHARED:
        return None
    if all(step.name not in SCALES for step in steps) or not _are_of_channels(steps):
        return None
    source = narrow(view, first.value)
    rounds = _take_rounding(view, equations, source.aval.dtype)
    residual = _take_residual(view, equations)
    has_relu = bool(residual) or _take(view, equations, is_jax_relu)
    has_copies = bool(residual) and _take(view, equations, is_fork)
    result = Result(
        steps=tuple(step.name for step in steps),
        dtype=source.aval.dtype.name if rounds else None,
        residual=bool(residual),
        activation="relu" if has_relu else "none",
        copies=2 if has_copies else 1,
    )
    operands = (first.value, source, *(step.operand for step in steps))
    return Match(
        root=equations[-1],
        equations=frozenset(equations),
        operands=(*operands, *residual),
        site=ChannelAffineSite(result=result, shapes=tuple(s.shape for s in steps)),
    )


def _following(view: View, equations: Sequence[int]) -> int | None:
    """The equation with the only use of what the last of these makes."""
    return view.sole_consumer(view.eqns[equations[-1]].outvars[0])


def _take(
    view: View, equations: list[int], belongs: Callable[[Equation], bool]
) -> bool:
    """Takes the equation that follows, if it belongs to the site."""
    following = _following(view, equations)
    if following is None or not belongs(view.eqns[following]):
        return False
    equations.append(following)
    return True


def _take_rounding(view: View, equations: list[int], dtype: Any) -> bool:
    """Takes a conversion to this dtype."""

    def rounds(eqn: Equation) -> bool:
        result = eqn.outvars[0].aval
        return eqn.primitive.name == "convert_element_type" and result.dtype == dtype

    last: Any = view.eqns[equations[-1]].outvars[0].aval
    return last.dtype != dtype and _take(view, equations, rounds)


def _take_residual(view: View, equations: list[int]) -> tuple[Atom, ...]:
    """Takes a sum with an array and the relu after it; the array, or nothing."""
    value = view.eqns[equations[-1]].outvars[0]
    following = _following(view, equations)
    if following is None or view.eqns[following].primitive.name != "add":
        return ()
    sum_, relu = view.eqns[following], _following(view, [following])
    if relu is None or not is_jax_relu(view.eqns[relu]):
        return ()
    residual: Any = next(x for x in sum_.invars if x is not value)
    if isinstance(residual, Literal):
        return ()
    types = [(x.aval.shape, x.aval.dtype) for x in (residual, value)]
    if types[0] != types[1]:
        return ()
    equations += [following, relu]
    return (residual,)


def fork_residuals(
    rule: Rule, eqns: Sequence[Equation], outvars: Sequence[Atom], viewed: Viewed
) -> Sequence[Equation]:
    """A fork after each residual block whose result is used twice."""
    if not any(is_jax_relu(eqn) for eqn in eqns):
        return eqns
    view = viewed(eqns)
    names: dict[int, dict[int, Any]] = {}  # of operands, by equation and place
    forks: dict[int, Equation] = {}  # by the equation before
    for index, eqn in enumerate(view.eqns):
        if eqn.primitive.name not in rule.anchors:
            continue
        match = match_channel_affine(view, index)
        if match is None or not match.site.result.residual:
            continue
        x, source, *_ = match.operands
        if not powers(view, source, x):  # no statistics of its own: no training
            continue
        relu = eqns[match.root]
        (value,) = relu.outvars
        places = [
            (i, place)
            for i in dict.fromkeys(view.consumers(value))
            for place, x in enumerate(() if i == OUTPUT else eqns[i].invars)
            if x is value
        ]
        if len(places) != 2 or OUTPUT in view.consumers(value):
            continue
        copies = [type(value)(value.aval) for _ in places]
        forks[match.root] = relu.replace(
            primitive=fork_p, invars=[value], outvars=copies, params={}
        )
        for (i, place), copy in zip(places, copies, strict=True):
            names.setdefault(i, {})[place] = copy
    return eqns if not forks else list(_forked(eqns, forks, names))


def _forked(
    eqns: Sequence[Equation],
    forks: dict[int, Equation],
    names: dict[int, dict[int, Any]],
) -> Iterator[Equation]:
    for i, eqn in enumerate(eqns):
        if i in names:
            invars = [names[i].get(place, x) for place, x in enumerate(eqn.invars)]
            eqn = eqn.replace(invars=invars)
        yield eqn
        if i in forks:
            yield forks[i]


def is_fork(eqn: Equation) -> bool:
    return eqn.primitive is fork_p


CHANNEL_AFFINE = Rule(
    op="channel_affine",
    anchors=frozenset({"add", "sub", "mul", "div"}),
    match=match_channel_affine,
    prepare=fork_residuals,
    is_expected=False,  # most sums and products are of no norm
)


def _are_in_order(steps: list[_Step]) -> bool:
    """Returns whether no shift is between two scales.

    Sums of entries before a scale would follow from those before another one, but with
    less digits where what is between takes a mean away.
    """
    places = [i for i, step in enumerate(steps) if step.name in SCALES]
    return not places or len(places) == places[-1] - places[0] + 1


def _are_of_channels(steps: list[_Step]) -> bool:
    """True if operands vary along one dimension: the last one, where that was timed."""
    dims = {d for step in steps for d, n in enumerate(step.shape) if n != 1}
    last = steps[0].value.aval.ndim - 1
    return len(dims) == 1 and (last in dims or planned_device().platform == "cpu")


def _shared(steps: list[_Step]) -> int:
    """Number of entries of the value that have the same operands."""
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
    """The operand that a value is broadcast from, and its shape with all dimensions.

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
