"""ALiBi: a bias that is a slope of each head times the distance of key and query.

The op makes it of the slopes and reads no bias:

    linear       slope * (j - i)        what is the same for all keys may be left out
    distance    -slope * abs(i - j)     linear, where the mask hides one side

Both are what programs compute but for the rounding of a product in float32, with whole
numbers that float32 holds exactly. What is rounded to fewer bits before it is added is
another function, and stays a bias. Callers: ``op_call`` and, for what it says about
heads, ``roles``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from tracea_jax.problem.attention import Alibi as Form
from tracea_jax.rewrite.attention.bias import Bias
from tracea_jax.rewrite.attention.dims import MOVES, Dims, Factors, aligned, backward
from tracea_jax.rewrite.attention.masks import Bound, Term
from tracea_jax.rewrite.attention.positions import Linear, linear
from tracea_jax.rewrite.attention.sinks import origin
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sloped:
    """``factor`` times slopes, times a distance or its absolute value.

    Attributes:
      slopes, dims: an array.
      distance: of integers, along the keys and perhaps more.
      is_absolute: whether its sign does not count.
      factor: a number.
    """

    slopes: Atom
    dims: Dims
    distance: Linear
    is_absolute: bool
    factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Slopes as the op takes them: ``factor`` times an array, in one of its forms."""

    slopes: Atom
    dims: Dims
    factor: float
    form: Form


# --- what a bias is made of -----------------------------------------------------------


def sloped(view: View, bias: Bias, keys: Factors) -> Sloped | None:
    """A bias as slopes times a distance along the keys; None if it is another."""
    return _sloped(view, bias.atom, bias.dims, bias.factor, keys)


def _sloped(
    view: View, atom: Atom, dims: Dims, factor: float, keys: Factors
) -> Sloped | None:
    eqn = view.producer(atom)
    if eqn is None or atom.aval.dtype != np.float32:
        return None
    name = eqn.primitive.name
    if name in MOVES:
        source = backward(eqn, dims)
        if source is None:
            return None
        return _sloped(view, eqn.invars[0], source, factor, keys)
    if name == "copy":
        return _sloped(view, eqn.invars[0], dims, factor, keys)
    if name == "neg":
        return _sloped(view, eqn.invars[0], dims, -factor, keys)
    if name not in ("mul", "div"):
        return None
    for x, other in (eqn.invars, eqn.invars[::-1]):
        known = view.scalar(other)
        if known is not None and np.isfinite(known) and known != 0:
            by = 1 / known if name == "div" else known
            return _sloped(view, x, aligned(x, dims), factor * by, keys)
        if name == "div":
            return None
    return _multiplied(view, eqn, dims, factor, keys)


def _multiplied(
    view: View, eqn: Equation, dims: Dims, factor: float, keys: Factors
) -> Sloped | None:
    for slopes, other in (eqn.invars, eqn.invars[::-1]):
        found = _distance(view, other, aligned(other, dims), 1.0)
        if found is None or keys not in dict(found[0].positions):
            continue
        source, own = origin(view, slopes, aligned(slopes, dims))
        if source.aval.dtype.name not in DTYPES or not _is_of_others(own, found[0]):
            continue
        distance, is_absolute, sign = found
        return Sloped(
            slopes=source,
            dims=own,
            distance=distance,
            is_absolute=is_absolute,
            factor=factor * sign,
        )
    return None


def _distance(
    view: View, atom: Atom, dims: Dims, sign: float
) -> tuple[Linear, bool, float] | None:
    """(integer, whether its absolute value is meant, what that is multiplied with)."""
    eqn = view.producer(atom)
    inside = None if eqn is None else _absolute(view, eqn, dims, sign)
    if inside is not None:
        return inside
    found = linear(view, atom, dims)
    return None if found is None else (found, False, sign)


def _absolute(
    view: View, eqn: Equation, dims: Dims, sign: float
) -> tuple[Linear, bool, float] | None:
    """The same of what an equation makes of an absolute value; None if of another."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name == "abs":
        found = linear(view, eqn.invars[0], dims)
        fits = found is not None and _fits(found, dtype)
        return (found, True, sign) if found is not None and fits else None
    source: Dims | None = dims
    if name in MOVES:
        source = backward(eqn, dims)
    elif name == "neg":
        sign = -sign
    elif name not in ("copy", "convert_element_type", "stop_gradient"):
        return None
    if source is None:
        return None
    found = _distance(view, eqn.invars[0], source, sign)
    is_whole = found is not None and found[1] and _fits(found[0], dtype)
    return found if is_whole else None


def _fits(x: Linear, dtype: Any) -> bool:
    return x.fits(dtype) and x.times(-1).fits(dtype)


def _is_of_others(dims: Dims, distance: Linear) -> bool:
    """Returns whether slopes vary along nothing that the distance does."""
    along = {f.axis for d, _ in distance.positions for f in d}
    along |= {f.axis for x, _ in distance.unknowns for d in x.dims for f in d}
    return not any(f.axis in along for d in dims for f in d)


# --- as the op has it -----------------------------------------------------------------


def alibi(
    found: Sloped,
    *,
    queries: Factors,
    keys: Factors,
    terms: Iterable[Term],
    is_exact: bool,
) -> Alibi | None:
    """The slopes as the op takes them; None if it has no such bias.

    Args:
      found: the bias.
      queries, keys: what positions of queries and keys are called.
      terms: the mask.
      is_exact: whether what is the same for all keys counts, too: a cap or a sink
        tells how large scores are. Positions are counted from the start then.
    """
    x, factor, is_absolute = found.distance, found.factor, found.is_absolute
    if is_absolute and any(_is_at_least(x, term) for term in terms):
        is_absolute = False
    elif is_absolute and any(_is_at_least(x.times(-1), term) for term in terms):
        is_absolute, factor = False, -factor
    along = dict(x.positions)
    of_key, of_query = along.pop(keys, 0), along.pop(queries, 0)
    if abs(of_key) != 1:
        return None
    if is_absolute or is_exact:
        if along or x.unknowns or x.offset or of_query != -of_key:
            return None
    elif _along(along, keys) or any(_along(u.dims, keys) for u, _ in x.unknowns):
        return None
    sign = -1 if is_absolute else of_key
    return Alibi(
        slopes=found.slopes,
        dims=found.dims,
        factor=factor * sign,
        form="distance" if is_absolute else "linear",
    )


def _is_at_least(x: Linear, term: Term) -> bool:
    """Returns whether x >= 0 wherever a term of the mask holds."""
    if not isinstance(term, Bound):
        return False
    rest = x - term.linear
    return not rest.positions and not rest.unknowns and rest.offset >= 0


def _along(dims: Iterable[Factors], keys: Factors) -> bool:
    axes = {f.axis for f in keys}
    return any(f.axis in axes for d in dims for f in d)
