"""Masks of attention that say what they are, for ``mask=`` of ``ops.attention``.

    from tracea_jax import masks

    o = tracea.ops.attention(q, k, v, mask=masks.causal() & masks.window(1024))
    o = tracea.ops.attention(q, k, v, mask=masks.causal() & masks.segments(ids))

A mask of these is no array over all scores. A kernel skips what none of its queries
sees, and new ids, lengths or arrays of the same shape compile nothing again. ``a & b``
allows what both allow. A mask is a frozen value and a pytree with its arrays as leaves,
so that it may be an argument of jitted functions, and is mapped by ``jax.vmap``.
Printed, it is a sentence and a picture of its tiles.

The value is ``mask.Mask``; ``tiles`` makes the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from jax.typing import ArrayLike

from tracea_jax.masks import checks
from tracea_jax.masks.mask import Mask as Mask
from tracea_jax.mistakes import check_kind, flag, whole

__all__ = [
    "Mask",
    "block_sparse",
    "causal",
    "from_array",
    "lengths",
    "segments",
    "window",
]


def causal(*, from_end: bool = False) -> Mask:
    """Query i sees keys j <= i only.

    Args:
      from_end: whether positions count from the end, so that the last query stands at
        the last key: query i of T sees keys j <= i + S - T. With lengths they count
        from the end of each example.
    """
    return Mask(is_causal=True, from_end=flag("from_end", from_end))


def window(
    left: SupportsIndex, right: SupportsIndex | None = None, *, from_end: bool = False
) -> Mask:
    """Query i sees keys i - left <= j <= i + right only.

    Args:
      left, right: keys before and behind the query; without ``right`` both are
        ``left``, as in ``local_window_size``.
      from_end: as in ``causal``.
    """
    before = whole("left", left)
    behind = before if right is None else whole("right", right)
    return Mask(window=(before, behind), from_end=flag("from_end", from_end))


def segments(ids: ArrayLike, kv_ids: ArrayLike | None = None) -> Mask:
    """A query sees the keys with its own number only: packed documents.

    Args:
      ids: integers (B, T), or (T,) for all examples. They need no order, and none
        stands for padding. Sorted ones leave more tiles empty.
      kv_ids: (B, S) or (S,); those of the queries if there is none.

    Raises:
      ValueError: if they are no integers of up to 32 bits.
    """
    ids = checks.ids("ids", ids)
    kv_ids = ids if kv_ids is None else checks.ids("kv_ids", kv_ids)
    return Mask(segments=((ids, kv_ids),))


def lengths(q: ArrayLike | None = None, kv: ArrayLike | None = None) -> Mask:
    """Number of queries and keys of each example; the output of later queries is zero.

    Args:
      q, kv: int32 (B,), or a number for all examples; None for all that there are.

    Raises:
      ValueError: if they are no integers.
    """
    return Mask(
        q_lengths=() if q is None else (checks.lengths("q", q),),
        kv_lengths=() if kv is None else (checks.lengths("kv", kv),),
    )


def from_array(mask: ArrayLike) -> Mask:
    """A boolean array that broadcasts to (B, N, T, S); False forbids a key to a query.

    Raises:
      ValueError: if it is not boolean, or has more than 4 dimensions.
    """
    return Mask(arrays=(checks.array("mask", mask),), blocks=(None,))


def block_sparse(blocks: ArrayLike, block: tuple[int, int] = (128, 128)) -> Mask:
    """Whole blocks of scores are allowed or forbidden.

    Args:
      blocks: boolean (ceil(T / block[0]), ceil(S / block[1])), or with leading
        dimensions that broadcast to (B, N).
      block: (queries, keys) of a block.

    Raises:
      ValueError: if the array is not boolean, or a size of the block is not positive.
    """
    check_kind("block", block, Sequence, "two positive integers")
    sizes = [whole("block", n) for n in block]
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"{block=} must be two positive numbers")
    rows, keys = sizes
    return Mask(arrays=(checks.array("blocks", blocks),), blocks=((rows, keys),))
