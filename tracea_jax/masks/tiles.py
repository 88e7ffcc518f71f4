"""What a mask leaves of the tiles of scores, and what is said of it in print.

Caller: ``mask.Mask``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from tracea_jax.ir import tile_states
from tracea_jax.ir.tile_graph import KeyInterval, TileGraph
from tracea_jax.masks import checks

if TYPE_CHECKING:
    from tracea_jax.masks.mask import Mask

_EXAMPLE = 2048  # positions in the picture of a mask that does not say how many


def is_known(mask: Mask) -> bool:
    """Whether all arrays have values, as traced ones have not."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(mask))


def graph(
    mask: Mask, q_len: int, kv_len: int, block: tuple[int, int], example: int, head: int
) -> TileGraph:
    """See ``Mask.tile_graph``."""
    if not is_known(mask):
        raise ValueError("a mask whose arrays are traced has no tiles yet")
    states = _interval(mask, q_len, kv_len, example).states(q_len, block)
    for pair in mask.segments:
        ids = [np.asarray(x).reshape(-1, x.shape[-1]) for x in pair]
        q, k = (
            tile_states.segment_bounds(np, x[[min(example, len(x) - 1)]], block=n)
            for x, n in zip(ids, block, strict=True)
        )
        found = tile_states.of_segments(np, q, k, block=block[1], kv_len=kv_len)
        states = np.minimum(states, found[0])
    for x, own in zip(mask.arrays, mask.blocks, strict=True):
        x = checks.rank_4(np.asarray(x))
        part = x[min(example, x.shape[0] - 1), min(head, x.shape[1] - 1)]
        states = np.minimum(states, _of_array(part, own, q_len, kv_len, block))
    return TileGraph.of(states, q_len, kv_len, block)


def _interval(mask: Mask, q_len: int, kv_len: int, example: int) -> KeyInterval:
    def least(lengths: tuple[Any, ...], most: int) -> int:
        found = [np.asarray(x).reshape(-1) for x in lengths]
        return min([most, *(int(x[min(example, len(x) - 1)]) for x in found)])

    limit = least(mask.kv_lengths, kv_len)
    start = limit - least(mask.q_lengths, q_len) if mask.from_end else 0
    left, right = mask.window or (None, None)
    if mask.is_causal:
        right = 0 if right is None else min(right, 0)
    return KeyInterval(
        kv_len=kv_len,
        limit=limit,
        left=None if left is None else left - start,
        right=None if right is None else right + start,
    )


def _of_array(
    x: np.ndarray,
    own: tuple[int, int] | None,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
) -> np.ndarray:
    if own == block:
        return tile_states.of_blocks(np, x, block=block, kv_len=kv_len)
    of_q, of_k = own or (1, 1)
    rows = x[np.arange(q_len) // of_q % len(x)]
    dense = rows[:, np.arange(kv_len) // of_k % x.shape[1]]
    return tile_states.of_mask(np, dense, block=block)


# --- in print -------------------------------------------------------------------------


def sentence(mask: Mask) -> str:
    """The parts of the mask in words."""
    parts = ["causal"] if mask.is_causal else []
    if mask.window is not None:
        parts.append("window of {} before and {} behind".format(*mask.window))
    if mask.from_end:
        parts.append("positions from the end")
    parts += ["segments"] * len(mask.segments)
    if mask.q_lengths:
        parts.append("lengths of queries")
    if mask.kv_lengths:
        parts.append("lengths of keys")
    for x, block in zip(mask.arrays, mask.blocks, strict=True):
        shape = "x".join(map(str, x.shape))
        of = "" if block is None else " of {}x{} blocks".format(*block)
        parts.append(f"array {shape}{of}")
    return f"mask: {' & '.join(parts) or 'all keys'}"


def shown_lengths(mask: Mask) -> tuple[int, int]:
    """(queries, keys) that the arrays tell, or that show the rules well."""
    lengths = [(len_q.shape[-1], len_k.shape[-1]) for len_q, len_k in mask.segments]
    for x, block in zip(mask.arrays, mask.blocks, strict=True):
        of_q, of_k = block or (1, 1)
        *_, rows, keys = (1, *x.shape)
        lengths.append((rows * of_q, keys * of_k))
    q_len, kv_len = map(max, zip((1, 1), *lengths, strict=True))
    q_len = max(q_len, _longest(mask.q_lengths))
    kv_len = max(kv_len, _longest(mask.kv_lengths))
    longest = max(q_len, kv_len)
    if longest > 1:  # one of them may be left open by a broadcast
        return (q_len, kv_len) if min(q_len, kv_len) > 1 else (longest, longest)
    usual = max(_EXAMPLE, 4 * max(mask.window or (0,)))
    return usual, usual


def _longest(lengths: tuple[Any, ...]) -> int:
    return max((int(np.max(np.asarray(x))) for x in lengths), default=0)


def shown(mask: Mask) -> tuple[int, int]:
    """The tile of a picture: the usual one, or a smaller one of short sequences."""
    q_len, kv_len = shown_lengths(mask)
    size = 1 << max(0, max(q_len, kv_len) // 16).bit_length() >> 1
    size = max(1, min(128, size))
    return size, size
