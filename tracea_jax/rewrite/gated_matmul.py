"""Gated pairs of products: activation(x @ a) * (x @ b)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.ranks import Ranks, as_ranks
from tracea_jax.ops.gated_matmul.primitive import gated_matmul_p
from tracea_jax.ops.matmul.stored import as_stored
from tracea_jax.rewrite.activation import Activated, activation_of
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import Operand, Product, product_at
from tracea_jax.rewrite.view import View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedMatmulSite:
    """A call of ``gated_matmul_p`` with the program's shape and dtype."""

    lhs: Operand
    rhs: Operand
    ranks: Ranks
    precision: Any
    activation: str
    out: str
    shape: tuple[int, ...]
    stored: tuple[str | None, str | None]

    def __call__(self, lhs: Any, gate: Any, up: Any) -> Any:
        operands = [self.lhs(lhs), self.rhs(gate), self.rhs(up)]
        (y,) = gated_matmul_p.bind(
            *lowering.align_varying_axes(operands),
            layout=self.lhs.letter + self.rhs.letter,
            out=jnp.dtype(self.out),
            precision=self.precision,
            activation=self.activation,
            **as_ranks(self.ranks),
            save_products=False,
            **as_stored(*self.stored),
            implementation=None,
            config=None,
        )
        return y.reshape(self.shape)


def match_gated(view: View, index: int) -> Match | None:
    """The pair whose gate is the product at a ``dot_general``."""
    if not _has_ups(view):
        return None
    gate = product_at(view, index)
    if isinstance(gate, str):
        return None
    activated = activation_of(view, view.eqns[gate.root].outvars[0])
    if activated is None:
        return None
    multiplied = view.sole_consumer(view.eqns[activated.root].outvars[0])
    if multiplied is None or view.eqns[multiplied].primitive.name != "mul":
        return None
    up = _up(view, multiplied, activated)
    if up is None or not _alike(gate, up):
        return None
    result = view.eqns[multiplied].outvars[0].aval
    site = GatedMatmulSite(
        lhs=gate.lhs,
        rhs=gate.rhs,
        ranks=gate.extents.ranks,
        precision=gate.precision,
        activation=activated.name,
        out=result.dtype.name,
        shape=tuple(result.shape),
        stored=gate.stored,
    )
    return Match(
        root=multiplied,
        equations=gate.equations | activated.equations | up.equations | {multiplied},
        operands=(*gate.operands, up.operands[1]),
        site=site,
    )


GATED_MATMUL = Rule(
    op="gated_matmul", anchors=frozenset({"dot_general"}), match=match_gated
)


def _has_ups(view: View) -> bool:
    """True if any product is multiplied with something: most programs have none."""
    if _has_ups not in view.memory:
        view.memory[_has_ups] = any(
            view.producer(atom, "dot_general", "transpose") is not None
            for eqn in view.eqns
            if eqn.primitive.name == "mul"
            for atom in eqn.invars
        )
    return view.memory[_has_ups]


def _up(view: View, multiplied: int, activated: Activated) -> Product | None:
    """The product that the gate is multiplied with, if nothing else uses it."""
    gate = view.eqns[activated.root].outvars[0]
    first, second = view.eqns[multiplied].invars
    other = second if first is gate else first
    if view.consumers(other) != [multiplied]:
        return None
    index = view.producer_index(other)
    if index is not None and view.eqns[index].primitive.name == "transpose":
        index = view.producer_index(view.eqns[index].invars[0])
    if index is None or index in view.taken:
        return None
    if view.eqns[index].primitive.name != "dot_general":
        return None
    product = product_at(view, index)
    if isinstance(product, str) or view.eqns[product.root].outvars[0] is not other:
        return None
    return product


def _alike(gate: Product, up: Product) -> bool:
    """True if both are products of the same lhs with weights of one shape and dtype."""
    dtypes = {x.aval.dtype for x in (gate.operands[1], up.operands[1])}
    return (
        gate.operands[0] is up.operands[0]
        and (gate.lhs, gate.rhs, gate.precision) == (up.lhs, up.rhs, up.precision)
        and gate.stored == up.stored
        and len(dtypes) == 1
    )
