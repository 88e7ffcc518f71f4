"""The call that replaces a cross entropy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.linear_cross_entropy.public import statistics
from tracea_jax.rewrite.cross_entropy.head import Reshaped, Sliced
from tracea_jax.rewrite.product import Operand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropySite:
    """A call of the op's primitive with a result in the program's shape and dtype.

    It takes x and w of the product, the bias if there is one, and the labels.

    Attributes:
      lhs, rhs: how x and w become canonical.
      contraction: how many dimensions of theirs are features.
      moves: how the rows of x become those of the labels.
      has_bias: whether there is one.
      logits: dtype that they are rounded to.
      precision: as in ``jax.lax.dot_general``.
      chunk: columns of the vocabulary at a time.
      sign: 1 for the label's logit less the log-sum-exp, -1 for the loss.
      is_whole: whether labels choose of the difference, not of the logits alone.
      is_raw: whether the program subtracts a maximum that may be infinite: then a logit
        of infinity makes NaN of all in its row.
      outside: what labels outside of the vocabulary choose: "nan", "zero", or "clip"
        for the nearest inside.
      summed: axes of the rows, ``lead``, that are summed over.
      lead: dimensions of the rows.
      out, shape: of the result.
    """

    lhs: Operand
    rhs: Operand
    contraction: int
    moves: tuple[Reshaped | Sliced, ...]
    has_bias: bool
    logits: str
    precision: Any
    chunk: int
    sign: int
    is_whole: bool
    is_raw: bool
    outside: str
    summed: tuple[int, ...]
    lead: tuple[int, ...]
    out: str
    shape: tuple[int, ...]

    def __call__(self, x: Any, w: Any, *rest: Any) -> Any:
        *bias, labels = rest
        x, w = self._rows(self.lhs(x)), self._matrix(self.rhs(w))
        for move in self.moves:
            x = move(x)
        vocabulary = w.shape["tn".index(self.rhs.letter)]
        labels = labels.reshape(x.shape[:-1])
        if labels.dtype.itemsize < 4:
            labels = labels.astype(jnp.int32)
        if self.outside == "clip":
            labels = jnp.clip(labels, 0, vocabulary - 1)
        lse, label = statistics(
            x,
            w,
            labels,
            bias[0].reshape(vocabulary) if self.has_bias else None,
            layout="n" + self.rhs.letter,
            logits=self.logits,
            precision=self.precision,
            chunk=self.chunk,
        )
        result = self._difference(lse, label, (labels >= 0) & (labels < vocabulary))
        if self.summed:
            result = result.reshape(self.lead).sum(self.summed)
        return (self.sign * result).reshape(self.shape).astype(self.out)

    def _rows(self, x: Any) -> Any:
        """x as (rows..., features)."""
        features = range(self.contraction)
        if self.lhs.letter == "t":
            x = jnp.moveaxis(x, features, [i - self.contraction for i in features])
        rows, own = x.shape[: -self.contraction], x.shape[-self.contraction :]
        return x.reshape(*rows, math.prod(own))

    def _matrix(self, w: Any) -> Any:
        """w with all features as one dimension, and one of the vocabulary."""
        if self.rhs.letter == "t":
            return w.reshape(w.shape[0], math.prod(w.shape[1:]))
        return w.reshape(math.prod(w.shape[:-1]), w.shape[-1])

    def _difference(self, lse: Any, label: Any, inside: Any) -> Any:
        """The label's logit less the log-sum-exp."""
        if self.is_raw:
            lse = lse * jnp.where(lse == jnp.inf, jnp.nan, 1)
        absent = jnp.nan if self.outside == "nan" else 0
        if self.is_whole:
            return jnp.where(inside, label - lse, absent)
        return jnp.where(inside, label, absent) - lse
