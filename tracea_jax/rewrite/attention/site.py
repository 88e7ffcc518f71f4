"""The call that replaces an attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.masks import Mask
from tracea_jax.ops.attention.public import attention
from tracea_jax.problem.attention import Alibi as Form
from tracea_jax.rewrite.attention.dims import Arrange
from tracea_jax.rewrite.attention.sliced import Within


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """A call of ``ops.attention`` with a result in the program's shape and dtype.

    It takes query, key and value, then biases, masks, lengths of queries and of keys,
    segment ids of queries and of keys, sinks, and slopes, as many as there are.

    Attributes:
      query, key, value: how the operands become (B, T, N, H) and (B, S, K, H).
      result: how (B, T, N, H) becomes the program's result.
      dtype: of the result.
      biases: what is added to the scores, with factors.
      masks: booleans, and the value with which they let a query see a key.
      q_lengths, kv_lengths: of each example, less an offset; None if there are none.
      segments: how the ids become (B, T) and (B, S); empty if there are none.
      sinks: how they become (N,), or the one number that they all are; or None.
      alibi: how slopes become (N,), a factor of them, and what they make of positions.
      scale, is_causal, window, soft_cap: arguments of the op.
      from_end: whether the rules on positions count from the end.
      zeroed: whether queries that see no key have a result of zero.
    """

    query: Arrange
    key: Arrange
    value: Arrange
    result: Arrange
    dtype: str
    biases: tuple[tuple[Arrange, float], ...]
    masks: tuple[tuple[Arrange, bool], ...]
    q_lengths: tuple[Arrange | Within, int] | None
    kv_lengths: tuple[Arrange | Within, int] | None
    segments: tuple[Arrange, ...]
    sinks: Arrange | float | None
    alibi: tuple[Arrange, float, Form] | None
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    zeroed: bool
    from_end: bool = False

    def __call__(self, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        pending = list(rest)
        bias = self._bias([pending.pop(0) for _ in self.biases])
        mask = self._mask([pending.pop(0) for _ in self.masks])
        rules = None
        if self.from_end:
            rules = Mask(is_causal=self.is_causal, window=self.window, from_end=True)
        lengths = [
            None if how is None else _lengths(how, pending.pop(0))
            for how in (self.q_lengths, self.kv_lengths)
        ]
        ids = [how(pending.pop(0)) for how in self.segments] or [None, None]
        sinks = self.sinks
        if isinstance(sinks, Arrange):
            sinks = sinks(pending.pop(0))
        elif sinks is not None:
            sinks = jnp.full(self.query.shape[2], sinks, jnp.float32)
        slopes, form = None, "distance"
        if self.alibi is not None:
            how, factor, form = self.alibi
            slopes = how(pending.pop(0)).astype(jnp.float32) * factor
        o = attention(
            self.query(q),
            self.key(k),
            self.value(v),
            bias,
            rules or mask,
            scale=self.scale,
            is_causal=self.is_causal and not self.from_end,
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            local_window_size=None if self.from_end else self.window,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
            logits_soft_cap=self.soft_cap,
            sinks=sinks,
            alibi_slopes=slopes,
            alibi=form,
        )
        if self.zeroed and mask is not None:
            o = jnp.where(mask.any(-1).swapaxes(1, 2)[..., None], o, 0)
        return self.result(o).astype(self.dtype)

    def _bias(self, values: list[Any]) -> Any:
        """The sum of all; one that stands alone keeps its dtype."""
        terms = []
        for (how, factor), x in zip(self.biases, values, strict=True):
            x = how(x)
            alone = factor == 1 and len(values) == 1
            terms.append(x if alone else x.astype(jnp.float32) * factor)
        return sum(terms[1:], terms[0]) if terms else None

    def _mask(self, values: list[Any]) -> Any:
        """Conjunction of all terms."""
        mask = None
        for (how, positive), x in zip(self.masks, values, strict=True):
            x = how(x if positive else ~x)
            mask = x if mask is None else mask & x
        return mask


def _lengths(how: tuple[Arrange | Within, int], x: jax.Array) -> jax.Array:
    arrange, offset = how
    x = arrange(x)
    return (x + offset if offset else x).astype(jnp.int32)
