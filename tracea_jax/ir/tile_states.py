"""States of the tiles of a mask: from masks, from blocks, from segment ids.

A tile is EMPTY if none of its queries sees any of its keys, FULL if each of them sees
all, else PARTIAL: only then a kernel looks at single scores. A tile that reaches behind
the last key is never full, since a kernel has to leave those keys out.

Arrays of states are uint8 (..., query tiles, key tiles); what two masks allow together
has the smaller state of both, or less. The module that functions take is ``jax.numpy``,
so that they can be steps of a call, or ``numpy``. What rules on positions leave,
``tile_graph`` says in closed form. Callers: ``tile_graph`` and the variants.
"""

from __future__ import annotations

from typing import Any

EMPTY, PARTIAL, FULL = 0, 1, 2

Bounds = tuple[Any, Any]


def of_mask(module: Any, mask: Any, *, block: tuple[int, int]) -> Any:
    """From a boolean mask (..., queries, keys)."""
    *leading, q_len, kv_len = mask.shape
    rows, keys = -q_len % block[0], -kv_len % block[1]
    unpadded = ((0, 0),) * len(leading)
    # Queries behind the last one see whatever the others do.
    edge = module.pad(mask, (*unpadded, (0, rows), (0, 0)), mode="edge")
    whole = module.pad(edge, (*unpadded, (0, 0), (0, keys)))
    tiles = whole.reshape(*leading, (q_len + rows) // block[0], block[0], -1, block[1])
    some, every = tiles.any((-3, -1)), tiles.all((-3, -1))
    return some.astype(module.uint8) + every.astype(module.uint8)


def of_blocks(module: Any, blocks: Any, *, block: tuple[int, int], kv_len: int) -> Any:
    """From a boolean mask with an entry for each tile."""
    most = _fullest(module, blocks.shape[-1], block[1], kv_len)
    return module.where(blocks, most, EMPTY).astype(module.uint8)


def segment_bounds(module: Any, ids: Any, *, block: int) -> Bounds:
    """(smallest, largest) id in each tile: (batch, tiles), of ids (batch, length)."""
    missing = -ids.shape[1] % block
    padded = module.pad(ids, ((0, 0), (0, missing)), mode="edge")
    tiles = padded.reshape(ids.shape[0], -1, block)
    return tiles.min(2), tiles.max(2)


def of_segments(
    module: Any, queries: Bounds, keys: Bounds, *, block: int, kv_len: int
) -> Any:
    """From the bounds of the ids in the tiles of queries, and in those of keys.

    Ids in no order can make a tile partial that is empty; never the reverse.
    """
    low_q, high_q = (bound[:, :, None] for bound in queries)
    low_k, high_k = (bound[:, None, :] for bound in keys)
    meet = (low_q <= high_k) & (low_k <= high_q)
    equal = (low_q == high_q) & (low_k == high_k) & (low_q == low_k)
    states = meet.astype(module.uint8) + equal.astype(module.uint8)
    most = _fullest(module, low_k.shape[2], block, kv_len)
    return module.minimum(states, most).astype(module.uint8)


def _fullest(module: Any, tiles: int, block: int, kv_len: int) -> Any:
    """The state that each tile of keys has at most."""
    whole = module.arange(tiles) < kv_len // block
    return module.where(whole, FULL, PARTIAL)
