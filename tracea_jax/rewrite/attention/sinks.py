"""Sinks: a softmax over one logit more, whose weight multiplies no value.

Programs write them in two ways. Either scores and sink are put together, and what the
softmax makes of the sink is dropped:

    softmax(concatenate([s, sink]))[..., :-1] @ v

or the sink has a summand of its own, shifted as the scores are:

    exp(s - m) / (sum(exp(s - m)) + exp(sink - m)) @ v

A softmax plus one, exp(s) / (1 + sum(exp(s))), is the latter with a sink of zero.
Caller: ``scores``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.rewrite.attention.derived import Derived
from tracea_jax.rewrite.attention.dims import (
    MOVES,
    Dims,
    Factors,
    aligned,
    axis,
    backward,
)
from tracea_jax.rewrite.attention.softmax import Softmax
from tracea_jax.rewrite.attention.sources import widens
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View

_JOINED = 999  # the axis of scores and sink together; products have few, values others

Shift = tuple[Atom, Dims]  # what is subtracted from logits, the same for all keys


@dataclasses.dataclass(frozen=True, slots=True)
class Sink:
    """A logit: an array with dimensions, or a number.

    Attributes:
      atom, dims: the array; None for a number.
      value: the number.
    """

    atom: Atom | None
    dims: Dims = ()
    value: float = 0.0


# --- put together with the scores -----------------------------------------------------


def joins(eqn: Equation) -> list[Atom]:
    """Operands that may be scores, if an equation puts one logit beside them."""
    if eqn.primitive.name != "concatenate" or len(eqn.invars) != 2:
        return []
    along = eqn.params["dimension"]
    a, b = eqn.invars
    return [x for x, other in ((a, b), (b, a)) if other.aval.shape[along] == 1]


def joined(eqn: Equation, dims: Dims) -> Dims:
    """Dimensions of scores and sink together, from those of the scores."""
    along = eqn.params["dimension"]
    whole = axis(_JOINED, eqn.outvars[0].aval.shape[along])
    return (*dims[:along], whole, *dims[along + 1 :])


def is_joined(summed: Factors) -> bool:
    """Returns whether a dimension is that of scores and sink."""
    return any(f.axis == _JOINED for f in summed)


def separated(dims: Dims, keys: Factors) -> Dims:
    """Dimensions of the scores alone.

    Raises:
      Refused: if the dimension of scores and sink is not one by itself.
    """
    found = tuple(keys if is_joined(d) and len(d) == 1 else d for d in dims)
    if any(is_joined(d) for d in found):
        raise Refused("its sink is mixed with other dimensions")
    return found


def dropped(eqn: Equation, dims: Dims, keys: Factors, *, first: bool) -> Dims:
    """Dimensions of the weights without the sink's, which a slice leaves out.

    Raises:
      Refused: if it leaves out something else.
    """
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(dims)
    found: list[Factors] = []
    sizes = eqn.invars[0].aval.shape
    for d, *cut, n in zip(dims, starts, limits, steps, sizes, strict=True):
        usual = (int(first), n - 1 + int(first), 1) if is_joined(d) else (0, n, 1)
        if tuple(cut) != usual:
            raise Refused("the probabilities are cut")
        found.append(keys if is_joined(d) else d)
    return tuple(found)


def beside(view: View, eqn: Equation, scores: Atom, dims: Dims) -> Sink:
    """The logit that is put beside scores, of which all have the dimensions."""
    other = eqn.invars[0 if eqn.invars[1] is scores else 1]
    return _sink(view, other, aligned(other, dims))


# --- a summand of its own -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """exp(sink - shift), where there is a shift.

    Attributes:
      sink: the logit.
      shifts: what is subtracted of it.
      equations: indices of those that depend on the scores.
    """

    sink: Sink
    shifts: tuple[Shift, ...]
    equations: frozenset[int]


def summand(view: View, softmax: Softmax, weights: Dims, derived: Derived) -> Summand:
    """The summand of a sink in the sum of exponentials.

    Args:
      view: the equations.
      softmax: with such an addition.
      weights: dimensions of the exponentials.
      derived: what depends on the scores.

    Raises:
      Refused: if it is something else.
    """
    division = softmax.division
    dims = division.of_addition(view, weights)
    assert division.addition is not None
    if dims is None:
        raise Refused("the sum of the softmax is moved unevenly")
    a, b = view.eqns[division.addition].invars
    atom = b if any(a is x for x in _made_of_sum(view, softmax)) else a
    equations = derived.slice(atom)
    if view.scalar(atom) == 1:
        return Summand(sink=Sink(None), shifts=(), equations=equations)
    found = origin(view, atom, aligned(atom, dims))
    eqn = view.producer(found[0], "exp")
    if eqn is None:
        raise Refused("something is added to the sum of its softmax")
    atom, dims = origin(view, eqn.invars[0], found[1])
    eqn = view.producer(atom, "neg", "sub")
    if eqn is None or eqn.invars[-1] not in derived:
        return Summand(sink=_sink(view, atom, dims), shifts=(), equations=equations)
    shift = origin(view, eqn.invars[-1], aligned(eqn.invars[-1], dims))
    sink = Sink(None)
    if eqn.primitive.name == "sub":
        sink = _sink(view, eqn.invars[0], aligned(eqn.invars[0], dims))
    return Summand(sink=sink, shifts=(shift,), equations=equations)


def _made_of_sum(view: View, softmax: Softmax) -> list[Atom]:
    division = softmax.division
    return [view.eqns[i].outvars[0] for i in (division.total, *division.steps)]


# --- both -----------------------------------------------------------------------------


def origin(view: View, atom: Atom, dims: Dims) -> Shift:
    """The origin of a value that is moved and perhaps widened, with its dimensions."""
    while (eqn := view.producer(atom)) is not None:
        source: Dims | None = dims
        if eqn.primitive.name in MOVES:
            source = backward(eqn, dims)
        elif eqn.primitive.name not in ("copy", "stop_gradient") and not widens(eqn):
            break
        if source is None:
            break
        atom, dims = eqn.invars[0], source
    return atom, dims


def _sink(view: View, atom: Atom, dims: Dims) -> Sink:
    known = view.scalar(atom)
    if known is not None:
        return Sink(None, value=known)
    atom, dims = origin(view, atom, dims)
    if atom.aval.dtype.name not in DTYPES:
        raise Refused(f"its sinks are {atom.aval.dtype}")
    return Sink(atom, dims)
