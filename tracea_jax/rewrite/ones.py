"""Multiplications by ones, as by head masks that mask nothing, as what they are.

A mask that a model multiplies probabilities with is mostly made of ones, or integers.
Rules read a copy or a transpose in place of the product, and so see through it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core.primitives import copy_p, transpose_p

from tracea_jax.rewrite.view import Equation, View


def without_ones(view: View) -> list[Equation]:
    """The equations, products with known ones replaced; the same list if none is."""
    eqns = [_plain(view, eqn) or eqn for eqn in view.eqns]
    same = all(a is b for a, b in zip(eqns, view.eqns, strict=True))
    return view.eqns if same else eqns


def _plain(view: View, eqn: Equation) -> Equation | None:
    name = eqn.primitive.name
    if name == "mul":
        return _copied(view, eqn)
    return _transposed(view, eqn) if name == "dot_general" else None


def _copied(view: View, eqn: Equation) -> Equation | None:
    """x, for x * 1 and 1 * x."""
    (result,) = eqn.outvars
    if not jnp.issubdtype(result.aval.dtype, jnp.floating):
        return None
    for x, other in (eqn.invars, eqn.invars[::-1]):
        if x.aval == result.aval and view.scalar(other) == 1:
            return eqn.replace(primitive=copy_p, invars=[x], params={})
    return None


def _transposed(view: View, eqn: Equation) -> Equation | None:
    """x, its batches first, for a product that sums nothing, with a one for each batch.

    This is what ``jnp.einsum("bhqk,h->bhqk", x, ones)`` makes.
    """
    contract, batch = eqn.params["dimension_numbers"]
    if contract[0] or eqn.params.get("out_sharding") is not None:
        return None
    for place, x in enumerate(eqn.invars):
        other = eqn.invars[1 - place]
        whole = other.aval.ndim == len(batch[1 - place])
        if whole and _alike(x, eqn.outvars[0]) and view.scalar(other) == 1:
            first = [int(i) for i in batch[place]]
            rest = [i for i in range(x.aval.ndim) if i not in first]
            params = {"permutation": (*first, *rest)}
            return eqn.replace(primitive=transpose_p, invars=[x], params=params)
    return None


def _alike(x: Any, y: Any) -> bool:
    return (x.aval.dtype, x.aval.weak_type) == (y.aval.dtype, y.aval.weak_type)
