"""Terms added to scores: masks, as large negative numbers, and biases."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tracea_jax.rewrite.attention.dims import MOVES, Dims, aligned, backward
from tracea_jax.rewrite.attention.known_masks import band_of, is_table, table
from tracea_jax.rewrite.attention.masks import Bound, Term, choice
from tracea_jax.rewrite.view import Atom, Equation, View, remembered

# What is filled in, or added, for keys that are not seen is at most this: -1e4 as
# bfloat16 has it.
FORBIDS = -9984.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bias:
    """A value that is added, multiplied by a number."""

    atom: Atom
    dims: Dims
    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """Terms added to scores: a large negative number for masked keys, and a bias."""

    terms: tuple[Term, ...] = ()
    bias: Bias | None = None


@remembered
def added(view: View, atom: Atom, dims: Dims, factor: float) -> Added:
    """The mask and the bias in ``factor`` times a value."""
    whole = Added(bias=Bias(atom, dims, factor))
    if (known := view.scalar(atom)) is not None:
        return Added() if math.isfinite(known) else whole
    if (terms := _additive_mask(view, atom, dims, factor)) is not None:
        return Added(terms=terms)
    eqn = view.producer(atom)
    if eqn is None:
        return whole
    name = eqn.primitive.name
    if name in MOVES and (source := backward(eqn, dims)) is not None:
        return added(view, eqn.invars[0], source, factor)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype.kind in "fV":
        found = added(view, eqn.invars[0], dims, factor)
        # Rounding changes nothing of a mask: what forbids does so in any dtype.
        return found if _is_exact(eqn) or not found.bias else whole
    if name in ("add", "sub"):
        signs = (1, -1) if name == "sub" else (1, 1)
        parts = [
            added(view, x, aligned(x, dims), sign * factor)
            for x, sign in zip(eqn.invars, signs, strict=True)
        ]
        biases = [p.bias for p in parts if p.bias]
        if any(p.terms for p in parts) and len(biases) < 2:
            terms = tuple(dict.fromkeys(t for p in parts for t in p.terms))
            return Added(terms=terms, bias=biases[0] if biases else None)
    return whole


def _is_exact(eqn: Equation) -> bool:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return old.kind in "fV" and old.itemsize <= new.itemsize


def _additive_mask(
    view: View, atom: Atom, dims: Dims, factor: float
) -> tuple[Term, ...] | None:
    """The mask in a value that is 0 or forbids; None if it is another."""
    found = choice(view, atom, dims)
    if found is None:
        return _captured_mask(view, atom, dims, factor)
    for keep, forbid, positive in (
        (found.true, found.false, True),
        (found.false, found.true, False),
    ):
        if keep == 0 and forbid * factor <= FORBIDS:
            terms = found.terms(view, positive)
            return terms if terms is None or _sayable(terms) else None
    return None


def _sayable(terms: tuple[Term, ...]) -> bool:
    """True if the op can be told all terms that have no boolean in the program."""
    return all(
        x.linear.offset >= 0 and len(x.linear.positions) == 2
        for x in terms
        if isinstance(x, Bound) and x.leaf is None
    )


def _captured_mask(
    view: View, atom: Atom, dims: Dims, factor: float
) -> tuple[Term, ...] | None:
    value = table(view, atom) if is_table(dims) else None
    if value is None:
        return None
    bounds = band_of(value == 0, dims)
    added = value[value != 0].astype(np.float64) * factor
    if bounds is None or not (added <= FORBIDS).all():
        return None
    terms = tuple(Bound(x) for x in bounds)
    return terms if _sayable(terms) else None
