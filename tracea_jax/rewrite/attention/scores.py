"""Steps on scores between their product and the softmax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tracea_jax.rewrite.attention.bias import FORBIDS, Bias, added
from tracea_jax.rewrite.attention.derived import Derived, derived_along
from tracea_jax.rewrite.attention.dims import (
    MOVES,
    Dims,
    Factors,
    aligned,
    axis,
    backward,
    forward,
    merged,
)
from tracea_jax.rewrite.attention.masks import Term, conjuncts
from tracea_jax.rewrite.attention.sinks import (
    Shift,
    Sink,
    beside,
    is_joined,
    joined,
    origin,
    separated,
    summand,
)
from tracea_jax.rewrite.attention.softmax import Softmax
from tracea_jax.rewrite.attention.steps import Refused, keep_of
from tracea_jax.rewrite.product import why_not
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """softmax's operand as scale * product + biases, where the terms hold.

    Attributes:
      dot: index of the product.
      lhs, rhs: dimensions of its operands; each is an axis, contracted ones shared.
      dims: of the softmax's operand, without a sink that is put beside it.
      weights: the same with that sink.
      keys: what the softmax sums over, without that sink.
      scale: a number; with a cap, what it would be if nothing were capped.
      soft_cap: what bounds the scores, biases included; None if nothing does.
      terms: the mask.
      repeated: masks that made scores zero where they are forbidden anyway.
      biases: what is added.
      sink: a further logit of each softmax.
      sink_is_first: whether it comes before the scores, where it is put beside them.
      shifts: what is added that is the same for all keys, and so of no interest for a
        softmax without a sink.
      equations: indices of all that belong to it.
    """

    dot: int
    lhs: Dims
    rhs: Dims
    dims: Dims
    weights: Dims
    keys: Factors
    scale: float = 1.0
    soft_cap: float | None = None
    terms: tuple[Term, ...] = ()
    repeated: tuple[Term, ...] = ()
    biases: tuple[Bias, ...] = ()
    sink: Sink | None = None
    sink_is_first: bool = False
    shifts: tuple[Shift, ...] = ()
    equations: frozenset[int] = frozenset()


def scores_along(view: View, path: Sequence[int], softmax: Softmax) -> Scores:
    """The scores, if a path from a product to the softmax only masks and scales them.

    Raises:
      Refused: if it does something else.
    """
    dot = view.eqns[path[0]]
    check_product(dot)
    lhs, rhs, dims = axes_of(dot)
    places, keys = [dims], None
    for index in path[1:]:
        eqn = view.eqns[index]
        if eqn.primitive.name == "concatenate":
            keys = places[-1][eqn.params["dimension"]]
        places.append(_moved(eqn, places[-1]))
    summed = merged(f for i in softmax.axes for f in places[-1][i])
    if keys is None or not is_joined(summed):
        keys = summed
    scores = Scores(
        dot=path[0],
        lhs=lhs,
        rhs=rhs,
        dims=separated(places[-1], keys),
        weights=places[-1],
        keys=keys,
        equations=frozenset(path),
    )
    derived = derived_along(view, path, max(softmax.equations))
    for place in range(len(path) - 1, 0, -1):
        eqn = view.eqns[path[place]]
        value = view.eqns[path[place - 1]].outvars[0]
        reader = _Reader(view, eqn, value, places[place], derived)
        scores = reader.extended(scores)
    return _with_summand(view, softmax, scores, derived)


def _with_summand(
    view: View, softmax: Softmax, scores: Scores, derived: Derived
) -> Scores:
    """The scores with the sink that the sum has; a sink is shifted as they are."""
    shifts: tuple[Shift, ...] = ()
    if softmax.division.addition is not None:
        if scores.sink is not None:
            raise Refused("its softmax has two sinks")
        found = summand(view, softmax, scores.weights, derived)
        shifts = found.shifts
        equations = scores.equations | found.equations
        scores = dataclasses.replace(scores, sink=found.sink, equations=equations)
    if scores.sink is not None and scores.shifts != shifts:
        raise Refused("its scores are shifted otherwise than its sink")
    return scores


def check_product(dot: Equation) -> None:
    """Refuses a product that must stay as it is."""
    if reason := why_not(dot):
        raise Refused(reason)
    if any(0 in x.aval.shape for x in dot.invars):
        raise Refused("its arrays are empty")


def axes_of(dot: Equation) -> tuple[Dims, Dims, Dims]:
    """Dimensions of operands and result of a ``dot_general``, as axes of their own."""
    lhs, rhs = (x.aval for x in dot.invars)
    contract, batch = dot.params["dimension_numbers"]
    numbers = list(range(lhs.ndim, lhs.ndim + rhs.ndim))
    for left, right in (contract, batch):
        for i, j in zip(left, right, strict=True):
            numbers[int(j)] = int(i)
    first = tuple(axis(i, n) for i, n in enumerate(lhs.shape))
    second = tuple(axis(i, n) for i, n in zip(numbers, rhs.shape, strict=True))
    used = [{int(i) for i in (*c, *b)} for c, b in zip(contract, batch, strict=True)]
    out = [first[int(i)] for i in batch[0]]
    for dims, mine in zip((first, second), used, strict=True):
        out += [d for i, d in enumerate(dims) if i not in mine]
    return first, second, tuple(out)


def _moved(eqn: Equation, dims: Dims) -> Dims:
    if eqn.primitive.name == "concatenate":
        return joined(eqn, dims)
    if eqn.primitive.name not in MOVES:
        return dims
    found = forward(eqn, dims)
    if found is None:
        raise Refused("a reshape of the scores takes dimensions apart unevenly")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """One equation on the way of the scores.

    Attributes:
      view, eqn: the equation.
      value: which of its operands the scores are.
      dims: of its result.
      derived: what depends on the product.
    """

    view: View
    eqn: Equation
    value: Any
    dims: Dims
    derived: Derived

    def extended(self, scores: Scores) -> Scores:
        """The scores, of which the later equations are read, with this one."""
        match self.eqn.primitive.name:
            case "mul" | "div":
                return self._scaled(scores)
            case "add" | "sub":
                return self._added(scores)
            case "select_n":
                return self._selected(scores)
            case "tanh":
                return self._capped(scores)
            case "concatenate":
                return self._joined(scores)
        return scores

    @property
    def _other(self) -> Atom:
        a, b = self.eqn.invars
        return b if a is self.value else a

    def _scaled(self, scores: Scores) -> Scores:
        factor = self.view.scalar(self._other)
        if factor is not None and math.isfinite(factor) and factor != 0:
            by = 1 / factor if self.eqn.primitive.name == "div" else factor
            return dataclasses.replace(scores, scale=scores.scale * by)
        keep = keep_of(self.view, self.eqn, self.value)
        if keep is None:
            raise Refused("the scores are scaled by what is not known while tracing")
        repeated = (*scores.repeated, *keep.terms(self.view, self.dims))
        return dataclasses.replace(scores, repeated=repeated)

    def _capped(self, scores: Scores) -> Scores:
        """c * tanh(x), where c is the scale of all that was read so far."""
        cap = scores.scale
        if scores.soft_cap is not None or scores.biases or cap <= 0:
            raise Refused("the scores go through a tanh that is no soft cap")
        return dataclasses.replace(scores, soft_cap=cap)

    def _biased(self, scores: Scores, sign: int) -> Scores:
        """Adds a bias before a cap, where terms that are equal for all keys count."""
        other = self._other
        if other in self.derived or self.view.scalar(other) is not None:
            raise Refused("the scores are shifted before their cap")
        bias = Bias(other, aligned(other, self.dims), sign * scores.scale)
        return dataclasses.replace(scores, biases=(*scores.biases, bias))

    def _added(self, scores: Scores) -> Scores:
        sign = -1 if self.eqn.primitive.name == "sub" else 1
        if scores.soft_cap is not None:
            return self._biased(scores, sign)
        if self._other in self.derived:
            return self._shifted(scores)
        dims = aligned(self._other, self.dims)
        found = added(self.view, self._other, dims, sign * scores.scale)
        shifts = scores.shifts
        if self.view.scalar(self._other) and not found.bias:
            shifts = (*shifts, (self._other, ()))
        return dataclasses.replace(
            scores,
            terms=(*scores.terms, *found.terms),
            biases=(*scores.biases, *((found.bias,) if found.bias else ())),
            shifts=shifts,
        )

    def _shifted(self, scores: Scores) -> Scores:
        """A shift by the maximum, the same for all keys, changes nothing."""
        adds = self.eqn.primitive.name == "add"
        subtracts = self.eqn.invars[0] is self.value
        if not (adds or subtracts):
            raise Refused(
                "the scores are subtracted from another function of themselves"
            )
        view, atom, dims = self.view, self._other, aligned(self._other, self.dims)
        joined_keys = (f for d in scores.weights if is_joined(d) for f in d)
        keys = {*scores.keys, *joined_keys}
        while not _free_of(dims, keys):
            eqn = view.producer(atom, *MOVES, "stop_gradient", "convert_element_type")
            if eqn is None:
                raise Refused("the scores are added to another function of themselves")
            if eqn.primitive.name in MOVES:
                found = backward(eqn, dims)
                if found is None:
                    raise Refused("the shift of the scores takes dimensions apart")
                dims = found
            atom = eqn.invars[0]
        if not self.derived.is_maximum(self._other, negated=adds):
            raise Refused("the scores are shifted by what is not their maximum")
        whole = aligned(self._other, self.dims)
        return dataclasses.replace(
            scores,
            equations=scores.equations | self.derived.slice(self._other),
            shifts=(*scores.shifts, origin(view, self._other, whole)),
        )

    def _joined(self, scores: Scores) -> Scores:
        """Scores and a sink, of which both were shifted, if anything."""
        pristine = scores.scale == 1 and scores.soft_cap is None
        changed = (scores.sink, scores.terms, scores.repeated, scores.biases)
        if not pristine or any(changed):
            raise Refused("its scores and sinks are changed together")
        return dataclasses.replace(
            scores,
            sink=beside(self.view, self.eqn, self.value, self.dims),
            sink_is_first=self.eqn.invars[1] is self.value,
            shifts=(),
        )

    def _selected(self, scores: Scores) -> Scores:
        if scores.soft_cap is not None:
            raise Refused("the scores are masked before their cap")
        which, on_false, on_true = self.eqn.invars
        positive = on_true is self.value
        fill = self.view.scalar(on_false if positive else on_true)
        if fill is None or which.aval.dtype != bool:
            raise Refused("masked scores are replaced by what is not known")
        if not fill * scores.scale <= FORBIDS:  # NaN neither
            raise Refused(f"masked scores are replaced by {fill:g}, no large number")
        dims = aligned(which, self.dims)
        terms = conjuncts(self.view, which, dims, positive)
        return dataclasses.replace(scores, terms=(*scores.terms, *terms))


def _free_of(dims: Dims, keys: set[Any]) -> bool:
    axes = {f.axis for f in keys}
    return not any(f.axis in axes for d in dims for f in d)
