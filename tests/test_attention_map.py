"""Maps of blocks and words of masks: equal to dense masks, as the device reads them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from device_code import compiles_device_code

from tracea_jax.runtime import nvrtc
from tracea_jax.variants.attention_map import mask_words, tile_map

SHAPES = [((300, 700), (128, 64)), ((70, 5000), (64, 96)), ((1, 1), (192, 128))]


def unpacked(words: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(seen, full) of (.., tiles, words), as booleans (.., tiles, blocks)."""
    n = np.arange(blocks)
    seen, full = (
        (words[..., 2 * (n // 32) + kind] >> (n % 32) & 1).astype(bool)
        for kind in (0, 1)
    )
    return seen, full


def tiles_of(allowed: np.ndarray, tile: tuple[int, int], reduce) -> np.ndarray:
    """The reduction of each tile of (.., queries, keys)."""
    rows = range(0, allowed.shape[-2], tile[0])
    columns = range(0, allowed.shape[-1], tile[1])
    parts = [
        [
            reduce(allowed[..., a : a + tile[0], b : b + tile[1]], axis=(-2, -1))
            for b in columns
        ]
        for a in rows
    ]
    return np.moveaxis(np.asarray(parts), (0, 1), (-2, -1))


def some_mask(*shape: int) -> np.ndarray:
    """Random, with tiles that are empty and tiles that are full."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[:, :, :128] = False
    mask[:, -1] = True
    mask[..., 130:, :256] = True
    return mask


def ids(length: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).integers(0, 5, (2, length))).astype("i4")


@pytest.mark.parametrize(("shape", "tile"), SHAPES, ids=str)
@pytest.mark.parametrize("module", [np, jnp])
def test_a_mask_says_which_tiles_are_seen_and_full(module, shape, tile):
    mask = some_mask(1, 3, *shape)
    words = tile_map(
        module,
        module.asarray(mask),
        names=("mask",),
        shape=shape,
        tile=tile,
        block=(1, 1),
    )
    seen, full = unpacked(np.asarray(words), -(-shape[1] // tile[1]))
    np.testing.assert_array_equal(seen, tiles_of(mask, tile, np.any))
    np.testing.assert_array_equal(full, tiles_of(mask, tile, np.all))


@pytest.mark.parametrize(("shape", "tile"), SHAPES, ids=str)
def test_documents_are_skipped_exactly_and_other_segments_safely(shape, tile):
    queries, keys = ids(shape[0], 1), ids(shape[1], 2)
    keys[1] = keys[1][::-1]  # descending
    for sorted_ids in (True, False):
        if not sorted_ids:
            keys = np.random.default_rng(3).permuted(keys, axis=1)
        words = tile_map(
            np,
            *(queries, keys),
            names=("q_segments", "kv_segments"),
            shape=shape,
            tile=tile,
            block=(1, 1),
        )
        seen, full = unpacked(words, -(-shape[1] // tile[1]))
        allowed = (queries[:, :, None] == keys[:, None])[:, None]
        np.testing.assert_array_equal(full, tiles_of(allowed, tile, np.all))
        needed = tiles_of(allowed, tile, np.any)
        assert not (needed & ~seen).any()
    # Sorted ids without gaps overlap where a score counts, and nowhere else.
    both = ids(shape[0], 1)
    words = tile_map(
        np,
        *(both, both),
        names=("q_segments", "kv_segments"),
        shape=(shape[0], shape[0]),
        tile=tile,
        block=(1, 1),
    )
    allowed = (both[:, :, None] == both[:, None])[:, None]
    seen, _ = unpacked(words, -(-shape[0] // tile[1]))
    np.testing.assert_array_equal(seen, tiles_of(allowed, tile, np.any))


def test_all_rules_hold_together():
    shape, tile = (300, 700), (128, 64)
    mask, queries, keys = some_mask(1, 3, *shape), ids(300, 1), ids(700, 2)
    words = tile_map(
        np,
        *(queries, keys, mask),
        names=("q_segments", "kv_segments", "mask"),
        shape=shape,
        tile=tile,
        block=(1, 1),
    )
    assert words.shape == (2, 3, 3, 2) and words.dtype == np.uint32
    seen, full = unpacked(words, 11)
    allowed = mask & (queries[:, None, :, None] == keys[:, None, None, :])
    assert not (tiles_of(allowed, tile, np.any) & ~seen).any()
    np.testing.assert_array_equal(full, tiles_of(allowed, tile, np.all))


@pytest.mark.parametrize(
    "block", [(128, 128), (256, 384), (100, 50), (1, 700)], ids=str
)
def test_blocks_of_a_mask_are_those_of_its_scores(block):
    shape, tile = (300, 700), (128, 128)
    entries = (
        np.random.default_rng(0).random(
            (2, 1, -(-shape[0] // block[0]), -(-shape[1] // block[1]))
        )
        < 0.4
    )
    mask = entries.repeat(block[0], 2)[:, :, : shape[0]]
    mask = mask.repeat(block[1], 3)[..., : shape[1]]
    words = tile_map(np, entries, names=("mask",), shape=shape, tile=tile, block=block)
    seen, full = unpacked(words, 6)
    np.testing.assert_array_equal(seen, tiles_of(mask, tile, np.any))
    np.testing.assert_array_equal(full, tiles_of(mask, tile, np.all))


@pytest.mark.parametrize("keys", [48, 112, 128])
@pytest.mark.parametrize("given", [(7, 300), (1, 300), (7, 1)])
def test_a_threads_word_has_its_own_entries(keys, given):
    """Bit of key j of a block: those of a lane are 8 i + 2 t and the next."""
    mask = np.random.default_rng(0).random((1, 2, *given)) < 0.5
    shape = (given[0], 300)
    words = mask_words(np, mask, shape=shape, keys=keys, block=(1, 1))
    blocks = -(-300 // keys)
    assert words.shape == (1, 2, given[0], 4 * blocks)
    words = words.reshape(1, 2, given[0], blocks, 4)
    for j in range(blocks * keys):
        block, column = divmod(j, keys)
        bit = 2 * (column // 8) + column % 2
        found = words[..., block, column % 8 // 2] >> bit & 1
        expected = np.broadcast_to(mask, (1, 2, *shape))[..., j] if j < 300 else 1
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def claims() -> list[str]:
    lines = []
    for first, last in ((0, 0), (0, 1), (3, 40), (31, 33), (0, 64), (64, 65), (5, 5)):
        for word in range(3):
            bits = sum(1 << i for i in range(32) if first <= 32 * word + i < last)
            found = f"bits_of_range({first}, {last}, {word})"
            lines.append(f"static_assert({found} == {bits}u);")
    for block, *which in (
        (0, 0, 0, 0),
        (77, 0, 1, 0),
        (1 << 24, 1, 0, 1),
        (5, 0, 1, 1),
    ):
        is_mixed, is_full, is_last = which
        flags = ", ".join(("false", "true")[flag] for flag in which)
        seen = f"SeenBlock::of({block}, {flags})"
        lines.append(f"static_assert({seen}.block() == {block});")
        lines.append(f"static_assert({seen}.is_mixed() == {is_mixed});")
        lines.append(f"static_assert({seen}.is_full() == {is_full});")
        lines.append(f"static_assert({seen}.is_last() == {is_last});")
    return lines


@pytest.mark.nvrtc
def test_the_device_looks_at_the_blocks_of_a_range():
    assert compiles_device_code("tile/block_map.cuh", claims())


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("first - 32 * word", "first"),
        ("count >= 32", "count > 32"),
        ("if (count <= 0) return 0;", ""),
        ("is_last << 1 | is_full << 0", "is_full << 1 | is_last << 0"),
    ],
)
def test_a_wrong_bit_is_noticed(right, wrong):
    with pytest.raises(nvrtc.CompileError):
        compiles_device_code("tile/block_map.cuh", claims(), change=(right, wrong))
