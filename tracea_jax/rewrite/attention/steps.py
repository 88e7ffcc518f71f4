"""Equations that change nothing of scores or weights, or set some of them to zero."""

from __future__ import annotations

import dataclasses

from tracea_jax.rewrite.attention.dims import Dims, aligned, axis
from tracea_jax.rewrite.attention.masks import Term, choice
from tracea_jax.rewrite.product import only_rounds
from tracea_jax.rewrite.view import Atom, Equation, View


class Refused(Exception):
    """Why a place that looks like attention is left as it is."""


def is_same(eqn: Equation) -> bool:
    """Returns whether an equation changes nothing of a value, or only rounds it.

    Kernels round between 16-bit dtypes and float32 where they like; what quantises to
    other dtypes means to.
    """
    return eqn.primitive.name == "copy" or only_rounds(eqn)


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
