"""How products are split over devices: rows, columns and batches freely, sums too.

Where the contraction is split, every device has the partial sums of a product without
an epilogue. They are added up once, scattered where the result is wanted so, and the
epilogue follows on what the device has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.partial_sums import completed
from tracea_jax.ops.common.ranks import Parts, Ranks
from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive
from tracea_jax.ops.matmul.definition import of_batches, split
from tracea_jax.problem import Epilogue


class Factors:
    """The factors of a product, by kinds of dimensions.

    Attributes:
      lhs, rhs, result: of their dimensions.
      rows, contraction, columns, batch: names of the factors of each kind.
      sizes: of all.
    """

    def __init__(self, lhs: Any, rhs: Any, layout: str, params: Params) -> None:
        ranks = Ranks.of(lhs, rhs, params)
        left, right = ranks.lhs(lhs, layout[0]), ranks.rhs(rhs, layout[1])
        self.sizes: dict[str, int] = {}
        self.batch = self._named("b", left.batch or right.batch)
        self.rows = self._named("m", left.outer)
        self.contraction = self._named("k", left.contraction)
        self.columns = self._named("n", right.outer)
        self.lhs = self._operand(left, self.rows, layout[0] == "n")
        self.rhs = self._operand(right, self.columns, layout[1] == "t")
        self.result = self.dims((*self.batch, *self.rows, *self.columns))

    def _named(self, letter: str, shape: Sequence[int]) -> tuple[str, ...]:
        names = tuple(f"{letter}{i}" for i in range(len(shape)))
        self.sizes |= dict(zip(names, shape, strict=True))
        return names

    def _operand(self, parts: Parts, outer: tuple[str, ...], outer_first: bool) -> Dims:
        pair = (outer, self.contraction) if outer_first else (self.contraction, outer)
        batch = self.batch if parts.batch else ()
        return self.dims((*batch, *pair[0], *pair[1]))

    def dims(self, names: Sequence[str]) -> Dims:
        """One factor a dimension; none of size 1."""
        return tuple((f,) if self.sizes[f] > 1 else () for f in names)


def rule(
    primitive: Primitive,
    avals: Sequence[Aval],
    *,
    layout: str,
    epilogue: Epilogue,
    **params: Any,
) -> Rule:
    """The rule of the primitive of matmul."""
    lhs, rhs, *_ = avals
    factors = Factors(lhs, rhs, layout, params)
    operands = [factors.lhs, factors.rhs]
    if epilogue.bias != "none":
        own = factors.batch if epilogue.bias == "batched_row" else ()
        operands.append(factors.dims((*own, *factors.columns)))
    if epilogue.residual:
        operands.append(factors.result)
    results = [factors.result] * (1 + epilogue.save_preactivation)
    if epilogue.column_sums:
        results.append(factors.dims(factors.columns))
    how: Params = {"layout": layout, "epilogue": epilogue, **params}
    return Rule(
        operands=tuple(operands),
        results=tuple(results),
        sizes=factors.sizes,
        late=tuple(range(2, len(operands))),
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
    """The results of one device; a split sum is complete before the epilogue."""
    epilogue: Epilogue = params["epilogue"]
    if device.splits(factors.contraction):
        results = _summed(primitive, params, operands, device)
    else:
        results = primitive.bind(*operands, **params)
    if epilogue.column_sums:
        summed = (*factors.batch, *factors.rows)
        # Of 16 bits where the derivative has them: what plain JAX sums up and sends.
        sums = device.total(results[-1], summed, params["out"])
        results = [*results[:-1], sums]
    return results


def _summed(
    primitive: Primitive, params: Params, operands: Sequence[jax.Array], device: Device
) -> list[jax.Array]:
    epilogue: Epilogue = params["epilogue"]
    lhs, rhs, bias, residual = split(operands, epilogue)
    acc = completed(primitive, lhs, rhs, params, epilogue, device)
    bias = of_batches(bias, epilogue, Ranks.of(lhs, rhs, params))
    return epilogues.apply(acc, epilogue, bias, residual, params["out"])
