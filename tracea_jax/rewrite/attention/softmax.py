"""Softmax in a jaxpr: exp(x) over its sum, in any spelling."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.dims import MOVES, Dims, aligned, axis, backward
from tracea_jax.rewrite.attention.masks import Term, choice
from tracea_jax.rewrite.product import only_rounds
from tracea_jax.rewrite.view import OUTPUT, Atom, Equation, View


def is_same(eqn: Equation) -> bool:
    """Whether an equation changes nothing of a value, or only rounds it.

    Kernels round between 16-bit dtypes and float32 where they like; what quantises to
    other dtypes means to.
    """
    return eqn.primitive.name == "copy" or only_rounds(eqn)


class Refused(Exception):
    """Why a place that looks like attention is left as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """A mask that sets entries to zero: a boolean, or zeros and ones."""

    atom: Atom
    positive: bool = True

    def terms(self, view: View, dims: Dims) -> tuple[Term, ...]:
        found = choice(view, self.atom, aligned(self.atom, dims))
        terms = None if found is None else found.terms(view, self.positive)
        if terms is None:
            raise Refused("what is masked is no conjunction of masks")
        return terms


def keep_of(view: View, eqn: Equation, value: Atom) -> Keep | None:
    """The mask, if an equation sets some entries of a value to zero."""
    if eqn.primitive.name == "mul":
        other = eqn.invars[0] if eqn.invars[1] is value else eqn.invars[1]
        fake = tuple(axis(i, n) for i, n in enumerate(other.aval.shape))
        found = choice(view, other, fake)
        if found is None or found.zero_or_one() is None:
            return None
        return Keep(other, positive=found.true == 1)
    if eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
        which, on_false, on_true = eqn.invars
        if on_true is value and view.scalar(on_false) == 0:
            return Keep(which)
        if on_false is value and view.scalar(on_true) == 0:
            return Keep(which, positive=False)
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """exp(x) / sum(exp(x)), without a shift of x.

    Attributes:
      x: what it is taken of.
      axes: of x, that are summed over.
      result: the probabilities.
      masks: that apply to exp(x) before the sum.
      repeated: that apply to the summands only; harmless where x has them too.
      equations: indices of all that belong to it.
    """

    x: Atom
    axes: tuple[int, ...]
    result: Any
    masks: tuple[Keep, ...]
    repeated: tuple[Keep, ...]
    equations: frozenset[int]


def softmax_at(view: View, index: int) -> Softmax | None:
    """The softmax that an ``exp`` belongs to."""
    passed, masks = [index], []
    value = view.eqns[index].outvars[0]
    while (step := view.sole_consumer(value)) is not None:
        mask = keep_of(view, view.eqns[step], value)
        if mask is None and not is_same(view.eqns[step]):
            break
        masks += [mask] if mask else []
        passed.append(step)
        value = view.eqns[step].outvars[0]
    found = _sum_of(view, value, (), ())
    if found is None:
        return None
    summed, repeated = found
    numerators = {value}
    for i in summed[:-1]:
        if is_same(view.eqns[i]):
            numerators.add(view.eqns[i].outvars[0])
    divided = _divided(view, summed[-1], numerators)
    if divided is None:
        return None
    return Softmax(
        x=view.eqns[index].invars[0],
        axes=tuple(int(i) for i in view.eqns[summed[-1]].params["axes"]),
        result=view.eqns[divided[-1]].outvars[0],
        masks=tuple(masks),
        repeated=repeated,
        equations=frozenset((*passed, *summed, *divided)),
    )


def _sum_of(
    view: View, value: Any, passed: tuple[int, ...], masks: tuple[Keep, ...]
) -> tuple[tuple[int, ...], tuple[Keep, ...]] | None:
    """Equations from a value to its sum, and masks on the way."""
    for index in view.consumers(value):
        if index == OUTPUT or len(passed) > 4:
            continue
        eqn = view.eqns[index]
        inner = (*passed, index)
        if eqn.primitive.name == "reduce_sum":
            return inner, masks
        mask = keep_of(view, eqn, value)
        if mask or is_same(eqn):
            more = (*masks, mask) if mask else masks
            found = _sum_of(view, eqn.outvars[0], inner, more)
            if found is not None:
                return found
    return None


def _divided(view: View, index: int, numerators: set[Any]) -> list[int] | None:
    """Equations from the sum to the division by it, which repeats it along its axes."""
    passed: list[int] = []
    value, inverse = view.eqns[index].outvars[0], False
    while (step := view.sole_consumer(value)) is not None and len(passed) < 12:
        eqn = view.eqns[step]
        passed.append(step)
        other = eqn.invars[0] if eqn.invars[-1] is value else eqn.invars[-1]
        name = eqn.primitive.name
        is_denominator = name == "div" and eqn.invars[1] is value
        if (is_denominator and not inverse) or (name == "mul" and inverse):
            fits = not isinstance(other, Literal) and other in numerators
            if fits and _repeats(view, value, index, eqn.outvars[0].aval.shape):
                return passed
        if is_denominator and not inverse and view.scalar(other) == 1:
            inverse = True
        elif name == "integer_pow" and eqn.params["y"] == -1 and not inverse:
            inverse = True
        elif name not in MOVES and not is_same(eqn):
            return None
        value = eqn.outvars[0]
    return None


def _repeats(view: View, value: Atom, sum_index: int, shape: tuple[int, ...]) -> bool:
    """Whether a value is the sum, repeated along the axes that were summed over."""
    dims = aligned(value, tuple(axis(i, n) for i, n in enumerate(shape)))
    total = view.eqns[sum_index].outvars[0]
    while value is not total:
        eqn = view.producer(value)
        if eqn is None:
            return False
        if eqn.primitive.name in MOVES:
            source = backward(eqn, dims)
            if source is None:
                return False
            dims = source
        elif len(eqn.invars) == 2:  # 1 / x
            value = eqn.invars[1]
            continue
        value = eqn.invars[0]
    axes = view.eqns[sum_index].params["axes"]
    return dims == tuple(axis(i, n) for i, n in enumerate(shape) if i not in axes)
