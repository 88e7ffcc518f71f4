"""How gated products are split over devices: as the product with either weight.

Where the contraction is split, both products are completed before the gate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.partial_sums import completed
from tracea_jax.ops.common.sharding import Device, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.ops.matmul.sharding import Factors
from tracea_jax.variants.gated import gate_epilogue


def rule(
    primitive: Primitive,
    avals: Sequence[Aval],
    *,
    layout: str,
    save_products: bool,
    **params: Any,
) -> Rule:
    """The rule of the primitive of gated_matmul."""
    lhs, gate, _ = avals
    factors = Factors(lhs, gate, layout, params)
    how: Params = {"layout": layout, "save_products": save_products, **params}
    return Rule(
        operands=(factors.lhs, factors.rhs, factors.rhs),
        results=(factors.result,) * (3 if save_products else 1),
        sizes=factors.sizes,
        is_joint=True,
        local=functools.partial(_local, primitive, factors, how),
    )


def _local(
    primitive: Primitive,
    factors: Factors,
    params: Params,
    operands: Sequence[jax.Array],
    device: Device,
) -> list[jax.Array]:
    if not device.splits(factors.contraction):
        return primitive.bind(*operands, **params)
    others = {**params}
    activation, saves = others.pop("activation"), others.pop("save_products")
    if others["implementation"] not in (None, "xla"):
        others["implementation"] = "tracea"  # variants of ours are not matmul's
    lhs, *weights = operands
    step = gate_epilogue(activation, saves, fused=True)
    g, u = (completed(matmul_p, lhs, w, others, step, device) for w in weights)
    results = epilogues.apply(g, step, None, u, params["out"])
    return [*results, u.astype(params["out"])] if saves else results
