"""Softmax in a jaxpr: exp(x) over its sum, in any spelling."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.dims import axis
from tracea_jax.rewrite.attention.division import Division, division_by, weighted_sum
from tracea_jax.rewrite.attention.steps import Keep, is_same, keep_of
from tracea_jax.rewrite.view import OUTPUT, Atom, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """exp(x) / sum(exp(x)), without a shift of x.

    Attributes:
      x: what it is taken of.
      axes: of x, that are summed over.
      result: the probabilities; where they are divided later, exp(x).
      division: by the sum.
      is_deferred: whether it divides only what is made of the result.
      masks: that apply to exp(x) before the sum.
      repeated: that apply to the summands only; harmless where x has them too.
      equations: indices of all that belong to it.
    """

    x: Atom
    axes: tuple[int, ...]
    result: Any
    division: Division
    is_deferred: bool
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
    division = division_by(view, summed[-1])
    result = None if division is None else _result(view, division, numerators)
    if division is None or result is None:
        return None
    return Softmax(
        x=view.eqns[index].invars[0],
        axes=tuple(int(i) for i in view.eqns[summed[-1]].params["axes"]),
        result=result,
        division=division,
        is_deferred=result in numerators,
        masks=tuple(masks),
        repeated=repeated,
        equations=frozenset((*passed, *summed, *division.steps)),
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


def _result(view: View, division: Division, exponentials: set[Any]) -> Any | None:
    """The probabilities, or the exponentials of which a product is divided."""
    numerator = division.numerator
    if isinstance(numerator, Literal) or numerator not in exponentials:
        return weighted_sum(view, division, exponentials)
    whole = tuple(axis(i, n) for i, n in enumerate(numerator.aval.shape))
    if division.of_sum(view, whole) != division.kept(view, whole):
        return None
    return view.eqns[division.root].outvars[0]
