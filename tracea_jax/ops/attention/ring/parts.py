"""Sums over parts of the keys: outputs merged by their log-sum-exp, gradients added.

A part gives o_i = softmax(s_i) v_i and lse_i = log(sum(exp(s_i))) of the keys it has:

    lse = log(sum of exp(lse_i))        o = sum of exp(lse_i - lse) o_i

which for two parts are, with d = lse_1 - lse_2,

    lse = max(lse_1, lse_2) - log(sigmoid(|d|))
    o = sigmoid(d) o_1 + sigmoid(-d) o_2

All sums are float32, or float64 for operands of float64. A query that sees no key of a
part has lse_i = -inf, and its weight there is exactly zero, whatever o_i is. Caller:
``attend``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracea_jax.ops.attention.ring.order import SEQUENCE
from tracea_jax.ops.attention.ring.plan import Block, Range
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.typed import arange, lax, zeros, zeros_like

LENGTH = 2  # the dimension of queries in a log-sum-exp: (batch, heads, q_len)


class Attended(NamedTuple):
    """Output (batch, q_len, heads, columns), and log-sum-exp (batch, heads, q_len)."""

    o: jax.Array
    lse: jax.Array

    def of(self, queries: Range) -> Attended:
        return Attended(o=cut(self.o, queries), lse=cut(self.lse, queries, LENGTH))


def cut(x: Any, range_: Range, dimension: int = SEQUENCE) -> Any:
    """Some positions of an array."""
    if range_ == (0, x.shape[dimension]):
        return x
    return lax.slice_in_dim(x, *range_, axis=dimension)


def merged(whole: Attended | None, part: Attended, queries: Range) -> Attended:
    """What is known of all queries, with a part of the keys for some of them."""
    if whole is None:  # the part is of all queries, and rounded by its kernel
        return part
    known = whole.of(queries)
    equal = known.lse == part.lse  # both may be -inf
    ahead = jnp.where(equal, 0, known.lse - part.lse)
    lse = jnp.maximum(known.lse, part.lse) - jnp.log(jax.nn.sigmoid(abs(ahead)))
    o = _weighted(known.o, ahead) + _weighted(part.o, -ahead)
    return Attended(
        o=_replaced(widened(whole.o), o, queries),
        lse=_replaced(whole.lse, lse, queries, LENGTH),
    )


def widened(x: jax.Array) -> jax.Array:
    """In the dtype of sums."""
    return x.astype(promoted(x.dtype, jnp.float32))


def _weighted(o: jax.Array, ahead: jax.Array) -> jax.Array:
    o = widened(o)
    weight = jax.nn.sigmoid(ahead).swapaxes(1, 2)[..., None].astype(o.dtype)
    # NaN and infinities of what weighs nothing are not of the result.
    return jnp.where(weight == 0, 0, o * weight)


def _replaced(x: Any, part: Any, range_: Range, dimension: int = SEQUENCE) -> Any:
    """x with other values at some positions."""
    size = x.shape[dimension]
    before = cut(x, (0, range_[0]), dimension)
    behind = cut(x, (range_[1], size), dimension)
    present = [a for a in (before, part, behind) if a.shape[dimension]]
    return present[0] if len(present) == 1 else jnp.concatenate(present, dimension)


def added(total: jax.Array | None, part: jax.Array, range_: Range, size: int) -> Any:
    """The sum of gradients of all positions, with those of a part for some of them."""
    if range_ != (0, size):
        first, last = range_
        edges = [(0, 0, 0)] * part.ndim
        edges[SEQUENCE] = (first, size - last, 0)
        part = lax.pad(part, zeros((), part.dtype), edges)
    return part if total is None else widened(total) + widened(part)


def sums(first: list[jax.Array], second: list[jax.Array]) -> list[jax.Array]:
    """The sum of each pair."""
    pairs = zip(first, second, strict=True)
    return [widened(a) + widened(b) for a, b in pairs]


def seen(block: Block, ids: tuple[Any, ...]) -> jax.Array | None:
    """(1 or batch, queries): which queries see a key of the block; None if all do.

    Args:
      block: the block.
      ids: segment ids of its queries and keys, or none.
    """
    if not ids and not block.hides_rows:
        return None
    q_len, kv_len = block.shape
    left, right = block.window.left, block.window.right
    i, j = arange(q_len)[None], arange(kv_len)[None]
    if not ids:
        first = zeros_like(i) if left is None else jnp.maximum(i - left, 0)
        last = kv_len - 1 if right is None else jnp.minimum(i + right, kv_len - 1)
        return first <= last
    own, others = ids
    sees = own[:, :, None] == others[:, None, :]
    ahead = j - i[..., None]
    if left is not None:
        sees = sees & (ahead >= -left)
    if right is not None:
        sees = sees & (ahead <= right)
    return sees.any(-1)
