"""Which blocks of keys a tile of queries sees, where only the device knows: as words.

From segment ids and boolean masks, in array code that XLA compiles: new ids and new
masks compile nothing. kernels/cuda/tile/block_map.cuh says what a map's words are, and
reads them; rules on positions and lengths are not in a map. Caller:
``variants.attention_sm90``.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.ir.tile_states import segment_bounds

_BITS = 32  # of a word
_STEP = 8  # keys of which a thread holds two, see kernels/cuda/tile/fragment.cuh
_LANES = 4  # that share a row
WORDS = _LANES  # of a mask, for a query and a block of keys


def tile_map(
    module: Any,
    *arrays: Any,
    names: tuple[str, ...],
    shape: tuple[int, int],
    tile: tuple[int, int],
    block: tuple[int, int],
) -> Any:
    """The map: uint32 (1 or batch, 1 or heads, tiles of queries, words).

    Args:
      module: ``jax.numpy``, or numpy.
      *arrays: what ``names`` says: "q_segments" (batch, queries) and "kv_segments"
        (batch, keys), "mask" (1 or batch, 1 or heads, 1 or queries, 1 or keys).
      names: of the arrays.
      shape: queries and keys.
      tile: queries and keys of a tile.
      block: queries and keys that an entry of the mask stands for.
    """
    x = dict(zip(names, arrays, strict=True))
    parts: list[tuple[Any, Any]] = []
    if "q_segments" in x:
        parts.append(_of_segments(module, x["q_segments"], x["kv_segments"], tile))
    if "mask" in x:
        parts.append(_of_mask(module, x["mask"], shape, tile, block))
    seen, full = parts[0]
    for others_seen, others_full in parts[1:]:
        seen, full = seen & others_seen, full & others_full
    words = _packed(module, module.stack([seen, full], -2))
    return module.moveaxis(words, -2, -1).reshape(*words.shape[:-2], -1)


def mask_words(
    module: Any,
    mask: Any,
    *,
    shape: tuple[int, int],
    keys: int,
    block: tuple[int, int],
) -> Any:
    """The mask as a kernel's threads read it: uint32 (.., queries, blocks * WORDS).

    A word holds the entries of one query for the keys of one lane in a block of
    ``keys`` keys, at most 128: bits 2 i and 2 i + 1 are those of its i-th pair. Keys
    that do not exist count as allowed.
    """
    mask = _of_scores(module, mask, shape, block)
    mask = _padded(module, mask, 3, keys, value=True)
    *front, total = mask.shape
    pairs = mask.reshape(*front, total // keys, keys // _STEP, _LANES, 2)
    by_lane = module.moveaxis(pairs, -2, -3)
    bits = by_lane.reshape(*front, total // keys, _LANES, keys // _STEP * 2)
    return _packed(module, bits)[..., 0].reshape(*front, -1)


def _of_segments(
    module: Any, queries: Any, keys: Any, tile: tuple[int, int]
) -> tuple[Any, Any]:
    """(seen, full) of each tile: (batch, 1, tiles of queries, blocks of keys).

    A tile whose ids and a block's do not overlap is not seen. For ids that only grow
    these are exactly the tiles without a score that counts.
    """
    low_q, high_q = segment_bounds(module, queries, block=tile[0])
    low_k, high_k = segment_bounds(module, keys, block=tile[1])
    low_q, high_q = low_q[:, None, :, None], high_q[:, None, :, None]
    low_k, high_k = low_k[:, None, None, :], high_k[:, None, None, :]
    seen = (low_q <= high_k) & (low_k <= high_q)
    return seen, seen & (low_q == high_q) & (low_k == high_k)


def _of_mask(
    module: Any,
    mask: Any,
    shape: tuple[int, int],
    tile: tuple[int, int],
    block: tuple[int, int],
) -> tuple[Any, Any]:
    """(seen, full) of each tile: (1 or batch, 1 or heads, tiles, blocks of keys)."""
    if block[0] % tile[0] == 0 and block[1] % tile[1] == 0:
        tiles = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
        entries = _of_scores(module, mask, (tiles[0], tiles[1]), _tiles(block, tile))
        return entries, entries
    mask = _of_scores(module, mask, shape, block)
    found: list[Any] = []
    for reduce, filler in ((module.any, False), (module.all, True)):
        whole = _padded(module, mask, 2, tile[0], value=filler)
        whole = _padded(module, whole, 3, tile[1], value=filler)
        *front, queries, _ = whole.shape
        split = whole.reshape(*front, queries // tile[0], tile[0], -1, tile[1])
        found.append(reduce(split, (-3, -1)))
    return found[0], found[1]


def _tiles(block: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    return block[0] // tile[0], block[1] // tile[1]


def _of_scores(
    module: Any, mask: Any, shape: tuple[int, int], block: tuple[int, int]
) -> Any:
    """The mask with an entry for each score."""
    for axis, (length, size) in enumerate(zip(shape, block, strict=True), 2):
        if size > 1:
            mask = module.repeat(mask, size, axis)
            mask = mask[:, :, :length] if axis == 2 else mask[..., :length]
    return module.broadcast_to(mask, (*mask.shape[:2], *shape))


def _padded(module: Any, x: Any, axis: int, multiple: int, *, value: bool) -> Any:
    widths = [(0, 0)] * 4
    widths[axis] = (0, -x.shape[axis] % multiple)
    return module.pad(x, widths, constant_values=value)


def _packed(module: Any, bits: Any) -> Any:
    """Booleans (.., n) as words (.., ceil(n / 32)), bit i of the word from entry i."""
    behind = -bits.shape[-1] % _BITS
    bits = module.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, behind)])
    bits = bits.reshape(*bits.shape[:-1], -1, _BITS)
    weights = module.asarray([1 << i for i in range(_BITS)], "uint32")
    return (bits * weights).sum(-1).astype("uint32")
