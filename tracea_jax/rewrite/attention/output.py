"""The product of probabilities and values, and what its result becomes."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.rewrite.attention.dims import (
    MOVES,
    Dims,
    Factors,
    axis,
    forward,
    merged,
)
from tracea_jax.rewrite.attention.masks import Bound, Term
from tracea_jax.rewrite.attention.products import weighted_by
from tracea_jax.rewrite.attention.scores import Scores, check_product
from tracea_jax.rewrite.attention.sinks import dropped, is_joined
from tracea_jax.rewrite.attention.softmax import Softmax
from tracea_jax.rewrite.attention.steps import Refused, keep_of
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View

_FIRST = 1000  # axes that only values have are numbered from here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """probabilities @ values, transposed and reshaped.

    Attributes:
      values: the operand, with the dimensions ``value_dims``.
      root: index of the equation with the result, of dimensions ``dims``.
      repeated: masks of the probabilities, which the scores must have, too.
      zeroed: the bound outside of which the result is set to zero.
      equations: indices of all that belong to it.
    """

    values: Atom
    value_dims: Dims
    root: int
    dims: Dims
    repeated: tuple[Term, ...]
    zeroed: Bound | None
    equations: frozenset[int]


def output_of(view: View, softmax: Softmax, scores: Scores, zeroes: bool) -> Output:
    """The product that uses the probabilities with all that only moves its result.

    Args:
      view: the equations.
      softmax, scores: the parts before it.
      zeroes: whether a mask of the result may be a part, if the scores have it, too.

    Raises:
      Refused: if it is no product over the keys, or not the only use.
    """
    weighted = weighted_by(view, softmax)
    dims, value = scores.weights, softmax.result
    repeated: list[Term] = []
    for index in weighted.steps:
        eqn = view.eqns[index]
        if (keep := keep_of(view, eqn, value)) is not None:
            repeated += keep.terms(view, dims)
        dims = _moved(eqn, dims, scores)
        value = eqn.outvars[0]
    if any(is_joined(d) for d in dims):
        raise Refused("its sink's weight is multiplied with a value")
    dot = view.eqns[weighted.dot]
    check_product(dot)
    value_dims, dims = _product(dot, weighted.place, dims, scores.keys)
    start = Output(
        values=dot.invars[1 - weighted.place],
        value_dims=value_dims,
        root=weighted.dot,
        dims=dims,
        repeated=tuple(repeated),
        zeroed=None,
        equations=frozenset((*weighted.steps, weighted.dot)),
    )
    terms = scores.terms if zeroes else ()
    if not softmax.is_deferred:
        return _followed(view, start, terms, None)
    output = _followed(view, start, terms, softmax.division.root)
    return _followed(view, _divided(view, softmax, scores, output), terms, None)


def _divided(view: View, softmax: Softmax, scores: Scores, output: Output) -> Output:
    """The output after its division by the sum of each query's exponentials."""
    division = softmax.division
    of_sum = division.kept(view, scores.weights)
    if division.numerator is not view.eqns[output.root].outvars[0]:
        raise Refused("its result is changed before it is divided")
    if division.of_sum(view, output.dims) != of_sum:
        raise Refused("its result is divided by the sums of other queries")
    equations = output.equations | {division.root}
    return dataclasses.replace(output, root=division.root, equations=equations)


def _moved(eqn: Equation, dims: Dims, scores: Scores) -> Dims:
    if eqn.primitive.name == "slice":
        return dropped(eqn, dims, scores.keys, first=scores.sink_is_first)
    if eqn.primitive.name not in MOVES:
        return dims
    found = forward(eqn, dims)
    if found is None:
        raise Refused("a reshape of the probabilities takes dimensions apart unevenly")
    return found


def _product(dot: Equation, place: int, dims: Dims, keys: Factors) -> tuple[Dims, Dims]:
    """Dimensions of the values and of the result."""
    contract, batch = dot.params["dimension_numbers"]
    mine, theirs = (
        [[int(i) for i in numbers[side]] for numbers in (contract, batch)]
        for side in (place, 1 - place)
    )
    summed = merged(f for i in mine[0] for f in dims[i])
    if sorted(summed) != sorted(keys):
        raise Refused("the softmax is not over what the product after it sums")
    shape = dot.invars[1 - place].aval.shape
    values = [axis(_FIRST + i, n) for i, n in enumerate(shape)]
    for own, other in zip(mine, theirs, strict=True):
        for i, j in zip(own, other, strict=True):
            values[j] = dims[i]
    kept = [d for i, d in enumerate(dims) if i not in (*mine[0], *mine[1])]
    new = [d for j, d in enumerate(values) if j not in (*theirs[0], *theirs[1])]
    free = [*kept, *new] if place == 0 else [*new, *kept]
    return tuple(values), (*(dims[i] for i in mine[1]), *free)


def _followed(
    view: View, output: Output, terms: tuple[Term, ...], end: int | None
) -> Output:
    """The output with the moves after it, as far as an equation."""
    while True:
        value = view.eqns[output.root].outvars[0]
        index = view.sole_consumer(value)
        if index is None or index == end:
            return output
        eqn = view.eqns[index]
        changes: dict[str, Any] = {}
        if eqn.primitive.name in MOVES:
            changes["dims"] = forward(eqn, output.dims)
        elif eqn.primitive.name == "mul" and output.zeroed is None:
            changes["zeroed"] = _zeroed(view, eqn, value, output.dims, terms)
        elif eqn.primitive.name != "convert_element_type" or not _is_float(eqn):
            return output
        if None in changes.values():
            return output
        equations = output.equations | {index}
        output = dataclasses.replace(output, root=index, equations=equations, **changes)


def _is_float(eqn: Equation) -> bool:
    return eqn.outvars[0].aval.dtype.name in DTYPES


def _zeroed(
    view: View, eqn: Equation, value: Any, dims: Dims, terms: tuple[Term, ...]
) -> Bound | None:
    """The bound, if results outside of one that the scores have are set to zero."""
    keep = keep_of(view, eqn, value)
    if keep is None:
        return None
    match keep.terms(view, dims):
        case (Bound() as bound,) if bound in terms:
            return bound
    return None
