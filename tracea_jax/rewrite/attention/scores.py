"""What happens to scores between their product and the softmax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.bias import FORBIDS, Bias, added
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
from tracea_jax.rewrite.attention.softmax import Refused, Softmax, keep_of
from tracea_jax.rewrite.product import why_not
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """softmax's operand as scale * product + biases, where the terms hold.

    Attributes:
      dot: index of the product.
      lhs, rhs: dimensions of its operands; each is an axis, contracted ones shared.
      dims: of the softmax's operand.
      keys: what the softmax sums over.
      scale: a number; with a cap, what it would be if nothing were capped.
      soft_cap: what bounds the scores, biases included; None if nothing does.
      terms: the mask.
      repeated: masks that made scores zero where they are forbidden anyway.
      biases: what is added.
      equations: indices of all that belong to it.
    """

    dot: int
    lhs: Dims
    rhs: Dims
    dims: Dims
    keys: Factors
    scale: float = 1.0
    soft_cap: float | None = None
    terms: tuple[Term, ...] = ()
    repeated: tuple[Term, ...] = ()
    biases: tuple[Bias, ...] = ()
    equations: frozenset[int] = frozenset()


def scores_along(view: View, path: Sequence[int], softmax: Softmax) -> Scores:
    """The scores, if a path from a product to the softmax only masks and scales them.

    Raises:
      Refused: if it does something else.
    """
    dot = view.eqns[path[0]]
    check_product(dot)
    lhs, rhs, dims = axes_of(dot)
    places = [dims]
    for index in path[1:]:
        places.append(_moved(view.eqns[index], places[-1]))
    keys = merged(f for i in softmax.axes for f in places[-1][i])
    scores = Scores(
        dot=path[0],
        lhs=lhs,
        rhs=rhs,
        dims=places[-1],
        keys=keys,
        equations=frozenset(path),
    )
    end = max(softmax.equations)
    derived = _derived(view, dot.outvars[0], end)
    inner = {view.eqns[i].outvars[0] for i in path}
    for place in range(len(path) - 1, 0, -1):
        eqn = view.eqns[path[place]]
        value = view.eqns[path[place - 1]].outvars[0]
        reader = _Reader(view, eqn, value, places[place], derived, inner)
        scores = reader.extended(scores)
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
    if eqn.primitive.name not in MOVES:
        return dims
    found = forward(eqn, dims)
    if found is None:
        raise Refused("a reshape of the scores takes dimensions apart unevenly")
    return found


def _derived(view: View, var: Any, end: int) -> set[Any]:
    """All values that depend on one, as far as some equation."""
    found, pending = {var}, [var]
    while pending:
        for index in view.consumers(pending.pop()):
            if 0 <= index <= end:
                new = set(view.eqns[index].outvars) - found
                found |= new
                pending += new
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """One equation on the way of the scores.

    Attributes:
      view, eqn: the equation.
      value: which of its operands the scores are.
      dims: of its result.
      derived: values that depend on the product.
      inner: the scores after each equation of the path.
    """

    view: View
    eqn: Equation
    value: Any
    dims: Dims
    derived: set[Any]
    inner: set[Any]

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
        """What is added before a cap: all of it counts, also the same for all keys."""
        other = self._other
        if _within(other, self.derived) or self.view.scalar(other) is not None:
            raise Refused("the scores are shifted before their cap")
        bias = Bias(other, aligned(other, self.dims), sign * scores.scale)
        return dataclasses.replace(scores, biases=(*scores.biases, bias))

    def _added(self, scores: Scores) -> Scores:
        sign = -1 if self.eqn.primitive.name == "sub" else 1
        if scores.soft_cap is not None:
            return self._biased(scores, sign)
        if _within(self._other, self.derived):
            return self._shifted(scores)
        dims = aligned(self._other, self.dims)
        found = added(self.view, self._other, dims, sign * scores.scale)
        return dataclasses.replace(
            scores,
            terms=(*scores.terms, *found.terms),
            biases=(*scores.biases, *((found.bias,) if found.bias else ())),
        )

    def _shifted(self, scores: Scores) -> Scores:
        """A shift that is the same for all keys changes nothing."""
        view, atom, dims = self.view, self._other, aligned(self._other, self.dims)
        keys = set(scores.keys)
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
        equations = scores.equations | self._slice(self._other)
        return dataclasses.replace(scores, equations=equations)

    def _slice(self, atom: Atom) -> frozenset[int]:
        """Equations between the scores and a function of them."""
        found: set[int] = set()
        pending = [atom]
        while pending:
            x = pending.pop()
            if not _within(x, self.derived) or x in self.inner:
                continue
            index = self.view.producer_index(x)
            if index is None or index in found:
                continue
            found.add(index)
            pending += self.view.eqns[index].invars
        return frozenset(found)

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


def _within(atom: Atom, values: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in values


def _free_of(dims: Dims, keys: set[Any]) -> bool:
    axes = {f.axis for f in keys}
    return not any(f.axis in axes for d in dims for f in d)
