"""Products of arrays with any number of rows, columns and batch dimensions.

A canonical product is one of matrices, or of matrices with one batch dimension. An
equation with other operands has the parameter ``ranks``. Its dimensions stay apart
through differentiation and where XLA computes it, so that each can be split over
devices; they are merged where a kernel is emitted. Callers: the primitives of matmul
and gated_matmul, and rules that bind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.typed import Params

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Numbers of dimensions of each kind that the operands of a product have.

    The lhs is (batch, rows, contraction) or, where its letter in the layout is "t",
    (batch, contraction, rows); the rhs (batch, contraction, columns), or with the last
    two exchanged; the result (batch, rows, columns). An operand that all batches share
    has no batch dimensions.
    """

    batch: int = 0
    rows: int = 1
    contraction: int = 1
    columns: int = 1

    @classmethod
    def of(cls, lhs: Any, rhs: Any, params: Params) -> Ranks:
        """Those of an equation's operands."""
        given = params.get("ranks")
        return cls(batch=int(3 in (lhs.ndim, rhs.ndim))) if given is None else given

    def lhs(self, x: Any, letter: str) -> Parts:
        """The parts of the lhs's shape."""
        return self._parts(x.shape, self.rows, letter == "n")

    def rhs(self, x: Any, letter: str) -> Parts:
        """The parts of the rhs's shape."""
        return self._parts(x.shape, self.columns, letter == "t")

    def _parts(self, shape: Sequence[int], outer: int, outer_first: bool) -> Parts:
        start = len(shape) - outer - self.contraction
        middle = start + (outer if outer_first else self.contraction)
        first, second = tuple(shape[start:middle]), tuple(shape[middle:])
        own, contraction = (first, second) if outer_first else (second, first)
        return Parts(batch=tuple(shape[:start]), outer=own, contraction=contraction)

    def dot_dimensions(
        self, lhs: Any, rhs: Any, layout: str
    ) -> jax.lax.DotDimensionNumbers:
        """Those of the ``lax.dot_general`` that contracts op(lhs) with op(rhs)."""
        left = lhs.ndim - (self.contraction if layout[0] == "n" else self._lhs_core)
        right = rhs.ndim - (self._rhs_core if layout[1] == "n" else self.contraction)
        count = range(self.contraction)
        contract = tuple(left + i for i in count), tuple(right + i for i in count)
        shared = lhs.ndim == self._lhs_core or rhs.ndim == self._rhs_core
        batch = () if shared else tuple(range(self.batch))
        return contract, (batch, batch)

    @property
    def _lhs_core(self) -> int:
        return self.rows + self.contraction

    @property
    def _rhs_core(self) -> int:
        return self.contraction + self.columns

    def has_batch(self, lhs: Any, rhs: Any) -> tuple[bool, bool]:
        """Which of the operands have batch dimensions."""
        return lhs.ndim > self._lhs_core, rhs.ndim > self._rhs_core

    def result(self, lhs: Any, rhs: Any, layout: str) -> Shape:
        """The shape of the product."""
        left, right = self.lhs(lhs, layout[0]), self.rhs(rhs, layout[1])
        return (*(left.batch or right.batch), *left.outer, *right.outer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The shape of an operand by kinds of dimensions; ``outer`` are rows or columns."""

    batch: Shape
    outer: Shape
    contraction: Shape

    def flat(self, letter: str, *, outer_first: bool) -> Shape:
        """The shape of the canonical operand.

        Args:
          letter: in the layout.
          outer_first: whether "n" has the outer dimensions first, as the lhs has.
        """
        pair = math.prod(self.outer), math.prod(self.contraction)
        if (letter == "n") != outer_first:
            pair = pair[::-1]
        return (*((math.prod(self.batch),) if self.batch else ()), *pair)


def as_ranks(ranks: Ranks) -> Params:
    """The primitives' parameter; nothing for a canonical product."""
    plain = Ranks(batch=min(ranks.batch, 1))
    return {} if ranks == plain else {"ranks": ranks}


def are_flat(params: Params) -> bool:
    """Returns whether an equation is a canonical product, as kernels compute it."""
    return "ranks" not in params


def over_rows(bias: jax.Array, ranks: Ranks, is_batched: bool) -> jax.Array:
    """A bias (batch?, columns) that broadcasts to the result."""
    if not is_batched:
        return bias
    batch, columns = bias.shape[: ranks.batch], bias.shape[ranks.batch :]
    return bias.reshape(*batch, *(1,) * ranks.rows, *columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A product under vmap.

    Attributes:
      ranks: without the mapped axis.
      inner: how many batch dimensions lhs and rhs have without it.
      batch: the mapped axis, and the sizes of the batch dimensions.
    """

    ranks: Ranks
    inner: tuple[int, int]
    batch: Shape

    @property
    def with_rows(self) -> Ranks:
        """Ranks with the mapped axis as one more dimension of rows."""
        return dataclasses.replace(self.ranks, rows=self.ranks.rows + 1)

    @property
    def with_batch(self) -> Ranks:
        """Ranks with the mapped axis as one more batch dimension."""
        return dataclasses.replace(self.ranks, batch=self.ranks.batch + 1)


def of_mapped(
    factors: Sequence[jax.Array],
    mapped: Sequence[bool],
    size: int,
    layout: str,
    params: Params,
) -> Mapped:
    """The product with mapped operands, whose axes come first."""
    lhs, rhs = (
        jax.ShapeDtypeStruct(x.shape[int(is_mapped) :], x.dtype)
        for x, is_mapped in zip(factors, mapped, strict=False)
    )
    ranks = Ranks.of(lhs, rhs, params)
    left, right = ranks.lhs(lhs, layout[0]), ranks.rhs(rhs, layout[1])
    return Mapped(
        ranks=ranks,
        inner=(len(left.batch), len(right.batch)),
        batch=(size, *(left.batch or right.batch)),
    )


def spread(x: jax.Array, is_mapped: bool, inner: int, batch: Shape) -> jax.Array:
    """An operand of a mapped product with all of its batch dimensions.

    Args:
      x: (mapped axis?, inner batch dimensions?, ...).
      is_mapped: whether x has the mapped axis.
      inner: how many inner batch dimensions x has.
      batch: the mapped axis and the inner batch dimensions.
    """
    core = x.shape[is_mapped + inner :]
    first = x.shape[:is_mapped] or (1,)
    others = x.shape[is_mapped : is_mapped + inner] or (1,) * (len(batch) - 1)
    return jnp.broadcast_to(x.reshape(*first, *others, *core), (*batch, *core))
