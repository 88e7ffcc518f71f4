"""The call that replaces a cross entropy."""

from __future__ import annotations

import dataclasses
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
        x, w = self.lhs(x), self.rhs(w)
        x = x.T if self.lhs.letter == "t" else x
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

    def _difference(self, lse: Any, label: Any, inside: Any) -> Any:
        """The label's logit less the log-sum-exp."""
        if self.is_raw:
            lse = lse * jnp.where(lse == jnp.inf, jnp.nan, 1)
        absent = jnp.nan if self.outside == "nan" else 0
        if self.is_whole:
            return jnp.where(inside, label - lse, absent)
        return jnp.where(inside, label, absent) - lse
