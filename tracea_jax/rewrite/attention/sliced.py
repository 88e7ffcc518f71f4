"""Masks that are rows of a larger one, taken at positions known at run time only.

A cache that holds S keys often has one causal mask of S x S, of which a decoding step
takes the row of its position, by a slice or an index. The larger mask is interpreted
over a dimension of its own in the place of the rows; then that dimension is replaced by
what was taken: row ``start + i`` of the larger mask is row i here. Caller: ``masks``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from tracea_jax.rewrite.attention.dims import Arrange, Dims, Factors, axis
from tracea_jax.rewrite.attention.positions import Limits, Linear, Unknown, linear
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """An arranged value, cut to the limits that a slice puts to where it starts."""

    arrange: Arrange
    limits: Limits

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.clip(self.arrange(x), *self.limits)


def arranged(how: Arrange, unknown: Unknown) -> Arrange | Within:
    """Arrangement of the unknown value's array."""
    return how if unknown.limits is None else Within(how, unknown.limits)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The part of its operand that an equation takes: dimensions, some of them rows.

    Attributes:
      dims: of the operand; the rows have an axis of their own.
      taken: that axis as a dimension -> which of them, as a linear function.
    """

    dims: Dims
    taken: dict[Factors, Linear]

    def of(self, x: Linear) -> Linear:
        """A function of positions in the operand, of positions in what was taken."""
        result = dataclasses.replace(x, positions=frozenset())
        for along, factor in x.positions:
            of_one = self.taken.get(along, Linear.position(along))
            result = result + of_one.times(factor)
        return result


def rows_of(view: View, eqn: Equation, dims: Dims) -> Rows | None:
    """The rows that a slice or an index takes; None for other equations or forms."""
    if eqn.primitive.name == "dynamic_slice":
        return _sliced(view, eqn, dims)
    if eqn.primitive.name == "gather":
        return _indexed(view, eqn, dims)
    return None


def _own_axis(view: View, eqn: Equation, place: int, size: int) -> Factors:
    """An axis that no product has: those are not negative."""
    index = view.producer_index(eqn.outvars[0])
    assert index is not None
    return axis(-1 - (index * 8 + place), size)


def _sliced(view: View, eqn: Equation, dims: Dims) -> Rows | None:
    operand, *starts = eqn.invars
    sizes = eqn.params["slice_sizes"]
    if len(starts) != len(sizes) or len(sizes) > 8:
        return None  # a size that is known at run time only
    found: list[Factors] = []
    taken: dict[Factors, Linear] = {}
    for place, (start, d) in enumerate(zip(starts, dims, strict=True)):
        whole, size = operand.aval.shape[place], sizes[place]
        if size == whole:
            found.append(d)
            continue
        along = _own_axis(view, eqn, place, whole)
        first = _start(view, start, whole - size)
        found.append(along)
        taken[along] = first + Linear.position(d)
    return Rows(tuple(found), taken)


def _start(view: View, atom: Atom, last: int) -> Linear:
    """Start of a slice, which never leaves its operand."""
    known = view.scalar(atom)
    if known is not None:
        return Linear(offset=float(min(max(int(known), 0), last)))
    return Linear(unknowns=frozenset({(Unknown(atom, (), (0, last)), 1)}))


def _indexed(view: View, eqn: Equation, dims: Dims) -> Rows | None:
    """An index of the first dimension, of which one is taken at each place."""
    operand, indices = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    rank = operand.aval.ndim
    usual = (
        eqn.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
        and numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and eqn.params["slice_sizes"] == (1, *operand.aval.shape[1:])
    )
    if not usual or rank > 8:
        return None
    outer = tuple(d for i, d in enumerate(dims) if i not in numbers.offset_dims)
    inner = tuple(dims[i] for i in numbers.offset_dims)
    row = linear(view, indices, (*outer, ()))
    if row is None:
        return None
    along = _own_axis(view, eqn, 0, operand.aval.shape[0])
    return Rows((along, *inner), {along: row})


def terms_of(
    view: View, eqn: Equation, leaf: Any, conjuncts: Callable[..., tuple[Any, ...]]
) -> tuple[Any, ...] | None:
    """Terms of the mask that an equation takes out of a larger one.

    None unless the larger one is made of bounds on positions.
    """
    rows = rows_of(view, eqn, leaf.dims)
    if rows is None or not rows.taken or () in rows.taken:
        return None
    found = conjuncts(view, eqn.invars[0], rows.dims, leaf.positive)
    if not all(hasattr(term, "linear") for term in found):
        return None
    return tuple(
        dataclasses.replace(term, linear=rows.of(term.linear), leaf=leaf)
        for term in found
        if not _is_always_true(term.linear)
    )


def _is_always_true(x: Linear) -> bool:
    """Returns whether a bound holds at all positions, as the far side of a band does.

    It would not look so any more once one of the positions is not known.
    """
    spans = (n * (math.prod(f.size for f in along) - 1) for along, n in x.positions)
    return not x.unknowns and x.offset + sum(min(0, span) for span in spans) >= 0
