"""The products of attention in a jaxpr: the one before the softmax, the one after it.

These find structure; what the dimensions and masks are is read along the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.attention.dims import MOVES
from tracea_jax.rewrite.attention.sinks import joins
from tracea_jax.rewrite.attention.softmax import Softmax
from tracea_jax.rewrite.attention.steps import Refused, is_same, keep_of
from tracea_jax.rewrite.view import OUTPUT, Equation, View

_DEPTH = 32  # equations between a product and the softmax; they are about ten
_SEARCHED = 256  # equations to look at for the product, those of biases included

# --- the product after it -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """The product of probabilities and values.

    Attributes:
      dot: index of the ``dot_general``.
      place: which of its operands the probabilities are.
      steps: indices of the equations from the probabilities to it.
    """

    dot: int
    place: int
    steps: tuple[int, ...]


def weighted_by(view: View, softmax: Softmax) -> Weighted:
    """The product that uses the probabilities, and nothing else does.

    Raises:
      Refused: if something else happens to them.
    """
    value, steps = softmax.result, []
    while len(steps) < _DEPTH:
        users = [i for i in view.consumers(value) if i not in softmax.equations]
        if len(users) != 1 or users[0] == OUTPUT or users[0] in view.taken:
            raise Refused(f"the probabilities are used {len(users)} times")
        (index,) = users
        eqn = view.eqns[index]
        name = eqn.primitive.name
        if name == "dot_general":
            place = 0 if eqn.invars[0] is value else 1
            return Weighted(dot=index, place=place, steps=tuple(steps))
        passes = name in (*MOVES, "slice") or is_same(eqn)
        if not passes and not keep_of(view, eqn, value):
            if _drops(view, index):
                raise Refused("dropout acts on the weights")
            raise Refused(f"the probabilities go through {name}")
        steps.append(index)
        value = eqn.outvars[0]
    raise Refused("the product with the values is too far from the softmax")


_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator")
_LATER = 4  # equations of a dropout between the weights and their product


def _drops(view: View, index: int | None) -> bool:
    """Tests whether an equation, or one soon after, takes random numbers to weights."""
    for _ in range(_LATER):
        if index is None or view.eqns[index].primitive.name == "dot_general":
            return False
        if any(_is_random(view, x) for x in view.eqns[index].invars):
            return True
        index = view.sole_consumer(view.eqns[index].outvars[0])
    return False


def _is_random(view: View, atom: Any) -> bool:
    """Returns whether a value is made of random numbers without any product."""
    pending, seen = [atom], set[int]()
    while pending and len(seen) < _DEPTH:
        index = view.producer_index(pending.pop())
        if index is None or index in seen:
            continue
        seen.add(index)
        eqn = view.eqns[index]
        name = str(eqn.params.get("name", ""))
        if eqn.primitive.name in _DRAWS or name in ("_bernoulli", "_uniform"):
            return True
        if eqn.primitive.name != "dot_general":
            pending += eqn.invars
    return False


# --- the scores before it -------------------------------------------------------------


def score_paths(view: View, var: Any, obstacles: list[str]) -> Iterator[list[int]]:
    """Ways from a product to a value: indices of equations, the product's first.

    Args:
      view: the equations.
      var: the value.
      obstacles: receives names of primitives that no way goes through.
    """
    yield from _paths(view, var, obstacles, set())


def _paths(
    view: View, var: Any, obstacles: list[str], seen: set[int]
) -> Iterator[list[int]]:
    index = view.producer_index(var)
    if index is None or index in seen or len(seen) > _SEARCHED:
        return
    seen.add(index)
    eqn = view.eqns[index]
    if eqn.primitive.name == "dot_general":
        yield [index]
        return
    sources = score_operands(view, eqn)
    if not sources and _product_near(view, var, _above):
        obstacles.append(eqn.primitive.name)
    for source in sources:
        for path in _paths(view, source, obstacles, seen):
            yield [*path, index]


def score_operands(view: View, eqn: Equation) -> list[Any]:
    """Operands that may be the scores, if an equation scales, masks, moves or caps.

    Or puts a sink beside them.
    """
    name = eqn.primitive.name
    is_passed = name in MOVES or name == "tanh"
    if is_passed or (is_same(eqn) and not _may_overflow(eqn)):
        return [eqn.invars[0]]
    whole = [
        x
        for x in eqn.invars
        if x.aval.shape == eqn.outvars[0].aval.shape and view.scalar(x) is None
    ]
    match name:
        case "add" | "mul":
            return whole
        case "div" | "sub":
            return [x for x in whole if x is eqn.invars[0]]
        case "select_n" if len(eqn.invars) == 3:
            return [x for x in whole if x is not eqn.invars[0]]
    return joins(eqn)


def _may_overflow(eqn: Equation) -> bool:
    """True if scores of a wider range become float16 ones: more than a rounding."""
    old, new = (x.aval.dtype.name for x in (eqn.invars[0], eqn.outvars[0]))
    return new == "float16" != old


def looks_like_attention(view: View, softmax: Softmax) -> bool:
    """True if there are products close before and after, whatever is in between."""
    return _product_near(view, softmax.x, _above) and _product_near(
        view, softmax.result, _below
    )


def _above(view: View, var: Any) -> list[Equation]:
    eqn = view.producer(var)
    return [] if eqn is None else [eqn]


def _below(view: View, var: Any) -> list[Equation]:
    return [view.eqns[i] for i in view.consumers(var) if i != OUTPUT]


def _product_near(view: View, var: Any, neighbours: Any) -> bool:
    pending, seen = [var], {var}
    while pending and len(seen) < _DEPTH:
        for eqn in neighbours(view, pending.pop(0)):
            if eqn.primitive.name == "dot_general":
                return True
            old, new = eqn.outvars, eqn.invars
            if neighbours is _below:
                old, new = new, old
            for x in new:
                if not isinstance(x, Literal) and x not in seen and _like(x, old, eqn):
                    seen.add(x)
                    pending.append(x)
    return False


def _like(x: Any, others: Sequence[Any], eqn: Equation) -> bool:
    """True if a value may be scores or weights where the others are, sinks or not."""
    sizes = {math.prod(y.aval.shape) for y in others if not isinstance(y, Literal)}
    if math.prod(x.aval.shape) in sizes:
        return True
    return eqn.primitive.name == "slice" or any(x is y for y in joins(eqn))
