"""Tiles of scores that a mask leaves, and their description in print.

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
    """Returns whether all arrays have values, as traced ones have not."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(mask))


def graph(
    mask: Mask, q_len: int, kv_len: int, block: tuple[int, int], example: int, head: int
) -> TileGraph:
    """See ``Mask.tile_graph``."""
    if not is_known(mask):
        raise ValueError("a mask whose arrays are traced has no tiles yet")
    if (misfit := why_misfit(mask, q_len, kv_len)) is not None:
        raise ValueError(misfit)
    states = _interval(mask, q_len, kv_len, example).states(q_len, block)
    for pair in mask.segments:
        ids = [np.asarray(x).reshape(-1, x.shape[-1]) for x in pair]
        q, k = (
            tile_states.segment_bounds(np, _of(x, "example", example)[None], block=n)
            for x, n in zip(ids, block, strict=True)
        )
        found = tile_states.of_segments(np, q, k, block=block[1], kv_len=kv_len)
        states = np.minimum(states, found[0])
    for x, own in zip(mask.arrays, mask.blocks, strict=True):
        x = checks.rank_4(np.asarray(x))
        part = _of(_of(x, "example", example), "head", head)
        states = np.minimum(states, _of_array(part, own, q_len, kv_len, block))
    return TileGraph.of(states, q_len, kv_len, block)


def _interval(mask: Mask, q_len: int, kv_len: int, example: int) -> KeyInterval:
    def least(lengths: tuple[Any, ...], most: int) -> int:
        found = [np.asarray(x).reshape(-1) for x in lengths]
        return min([most, *(int(_of(x, "example", example)) for x in found)])

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


def why_misfit(mask: Mask, q_len: int, kv_len: int) -> str | None:
    """Why an array of the mask is not one of these many queries and keys."""
    for pair in mask.segments:
        have = tuple(x.shape[-1] for x in pair)
        if have != (q_len, kv_len):
            return (
                f"segment ids of {have[0]} queries and {have[1]} keys do not fit "
                f"{q_len} queries and {kv_len} keys"
            )
    for x, block in zip(mask.arrays, mask.blocks, strict=True):
        need, have = _entries(block, q_len, kv_len), _rows_and_keys(x)
        if block is None and all(n in (1, m) for n, m in zip(have, need, strict=True)):
            continue
        if have != need:
            of = "" if block is None else " of {}x{} blocks".format(*block)
            return (
                f"an array{of} that ends in {have[0]}x{have[1]} does not fit {q_len} "
                f"queries and {kv_len} keys, which need {need[0]}x{need[1]}"
            )
    return None


def _rows_and_keys(x: Any) -> tuple[int, int]:
    *_, rows, keys = (1, *x.shape)
    return rows, keys


def _entries(block: tuple[int, int] | None, q_len: int, kv_len: int) -> tuple[int, int]:
    of_q, of_k = block or (1, 1)
    return -(-q_len // of_q), -(-kv_len // of_k)


def _of(x: np.ndarray, what: str, index: int) -> Any:
    """The part of one example or head; one part is that of all."""
    if len(x) == 1:
        return x[0]
    if not 0 <= index < len(x):
        raise ValueError(f"the mask has {len(x)} {what}s; there is no {what} {index}")
    return x[index]


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
    # One row, or one column, of scores is that of all.
    rows = np.minimum(np.arange(q_len) // of_q, x.shape[0] - 1)
    keys = np.minimum(np.arange(kv_len) // of_k, x.shape[1] - 1)
    return tile_states.of_mask(np, x[np.ix_(rows, keys)], block=block)


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
    q_len, kv_len = _told(mask, 0), _told(mask, 1)
    usual = max(_EXAMPLE, 4 * max(mask.window or (0,)))
    return q_len or kv_len or usual, kv_len or q_len or usual


def _told(mask: Mask, axis: int) -> int | None:
    """Number of positions; an exact source takes precedence."""
    arrays = list(zip(mask.arrays, mask.blocks, strict=True))
    scores = [_rows_and_keys(x)[axis] for x, block in arrays if block is None]
    exact = [pair[axis].shape[-1] for pair in mask.segments]
    exact += [size for size in scores if size > 1]  # one is of all positions
    covered = [_rows_and_keys(x)[axis] * b[axis] for x, b in arrays if b is not None]
    lengths = _longest((mask.q_lengths, mask.kv_lengths)[axis])
    return max(exact or covered or [lengths]) or None


def _longest(lengths: tuple[Any, ...]) -> int:
    return max((int(np.max(np.asarray(x))) for x in lengths), default=0)


def shown(mask: Mask) -> tuple[int, int]:
    """The tile of a picture: the usual one, or a smaller one of short sequences."""
    q_len, kv_len = shown_lengths(mask)
    size = 1 << max(0, max(q_len, kv_len) // 16).bit_length() >> 1
    size = max(1, min(128, size))
    return size, size
