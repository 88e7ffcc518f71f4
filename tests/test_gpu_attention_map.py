"""The map of blocks and the words of a mask on a GPU, against masks of all scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_map, attention_sm90
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.ir import tile_states
from tracea_jax.options import device_for
from tracea_jax.problem import AttentionProblem
from tracea_jax.runtime import launch, nvrtc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BASE = AttentionProblem(
    batch=2,
    q_len=300,
    kv_len=700,
    heads=3,
    kv_heads=3,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
TILES = ((128, 128), (64, 96), (192, 48))


def written(
    problem: AttentionProblem, tile: tuple[int, int], *arrays: np.ndarray
) -> dict[str, np.ndarray]:
    """Results of the kernel in buffers full of ones, by name."""
    config = AttentionSm90Config(tile_q=tile[0], tile_kv=tile[1])
    device = device_for("cuda")
    assert isinstance(device, CudaDevice)
    kernel = attention_map.kernel(problem, config, device)
    shapes = attention_sm90.buffer_shapes(problem, config)
    of = {"map": shapes["map"], "mask_words": shapes["mask"], "counter": (1,)}
    names = attention_map.writes(problem, config)
    results = [jax.ShapeDtypeStruct(of[name], jnp.uint32) for name in names]
    poison = [jnp.full(r.shape, 0xFFFFFFFF, r.dtype) for r in results]

    def launched(_, *operands):
        return launch.cuda_call(
            *operands,
            results=results,
            kernel=kernel,
            cubin=nvrtc.compile(kernel),
            embed=False,
        )

    call = jax.jit(launched, donate_argnums=0, keep_unused=True)
    found = call(poison, *map(jnp.asarray, arrays))
    return dict(zip(names, map(np.asarray, found), strict=True))


def unpacked(words: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(seen, full) of (.., tiles, words), as booleans (.., tiles, blocks)."""
    n = np.arange(blocks)
    seen, full = (
        (words[..., 2 * (n // 32) + kind] >> (n % 32) & 1).astype(bool)
        for kind in (0, 1)
    )
    return seen, full


def tiles_of(allowed: np.ndarray, tile: tuple[int, int], reduce: Any) -> np.ndarray:
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


def by_scores(problem: AttentionProblem, mask: np.ndarray) -> np.ndarray:
    """The mask with an entry for each score."""
    for axis, length in enumerate((problem.q_len, problem.kv_len), 2):
        block = (problem.mask_block or (1, 1))[axis - 2]
        mask = mask if mask.shape[axis] == 1 else mask.repeat(block, axis)
        mask = mask[:, :, :length] if axis == 2 else mask[..., :length]
    return np.broadcast_to(mask, (*mask.shape[:2], problem.q_len, problem.kv_len))


def some_mask(*shape: int) -> np.ndarray:
    """Random, with tiles that are empty and tiles that are full."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[:, :, :128] = False
    mask[:, -1] = True
    mask[..., 130:, :256] = True
    return mask


def ids(length: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).integers(0, 5, (2, length))).astype("i4")


def check_words(problem: AttentionProblem, tile: Any, mask: Any, words: Any) -> None:
    """A lane's bits 2 i and 2 i + 1 are those of keys 8 i + 2 lane and the next."""
    allowed = by_scores(problem, mask)[:, :, : words.shape[2]]
    blocks = -(-problem.kv_len // tile[1])
    behind = blocks * tile[1] - problem.kv_len
    allowed = np.pad(allowed, [(0, 0)] * 3 + [(0, behind)], constant_values=True)
    split = allowed.reshape(*allowed.shape[:3], blocks, tile[1] // 8, 4, 2)
    bits = np.moveaxis(split, -2, -3).reshape(*allowed.shape[:3], blocks * 4, -1)
    exact = bits @ (1 << np.arange(bits.shape[-1]))
    np.testing.assert_array_equal(words, exact.astype(np.uint32))


MASKS = {
    "scores": {"mask": (1, 3, 300, 700)},
    "odd": {"kv_len": 701, "mask": (2, 1, 300, 701)},
    "keys": {"mask": (2, 3, 1, 700)},
    "queries": {"mask": (1, 3, 300, 1)},
    "one": {"mask": (1, 1, 1, 1)},
    "tiny": {"q_len": 1, "kv_len": 7, "mask": (2, 3, 1, 7)},
    "long": {"q_len": 70, "kv_len": 9000, "mask": (1, 1, 70, 9000)},
    "blocks": {"mask": (2, 3, 3, 6), "mask_block": (128, 128)},
    "wide blocks": {"mask": (2, 1, 1, 1), "mask_block": (384, 768)},
    "other blocks": {"mask": (1, 3, 3, 14), "mask_block": (100, 50)},
    "rows": {"mask": (1, 1, 300, 1), "mask_block": (1, 700)},
}


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("segments", [False, True])
def test_a_mask(kind, tile, segments):
    problem = dataclasses.replace(BASE, segments=segments, **MASKS[kind])
    shape = problem.mask
    assert shape
    mask = some_mask(*shape)
    if kind in ("blocks", "other blocks"):
        mask = np.random.default_rng(1).random(shape) < 0.4
    given = [ids(problem.q_len, 1), ids(problem.kv_len, 2)] if segments else []
    found = written(problem, tile, *given, mask)
    seen, full = unpacked(found["map"], -(-problem.kv_len // tile[1]))
    allowed = by_scores(problem, mask)
    if segments:
        q_ids, kv_ids = given
        allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    exact = tiles_of(allowed, tile, np.any)
    if segments:
        assert not (exact & ~seen).any()
    else:
        np.testing.assert_array_equal(seen, exact)
    np.testing.assert_array_equal(full, tiles_of(allowed, tile, np.all))
    assert found["counter"] == 0
    if "mask_words" in found:
        check_words(problem, tile, mask, found["mask_words"])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("sizes", [(300, 700), (1, 1), (7, 9000), (9000, 7)], ids=str)
def test_segments(sizes, tile):
    problem = dataclasses.replace(BASE, q_len=sizes[0], kv_len=sizes[1], segments=True)
    rng = np.random.default_rng(3)
    for order in ("sorted", "descending", "random", "extreme"):
        queries, keys = ids(sizes[0], 1), ids(sizes[1], 2)
        if order == "descending":
            keys[1] = keys[1][::-1]
        if order == "random":
            keys = rng.permuted(keys, axis=1)
        if order == "extreme":
            ends = [np.where(x > 2, 2**31 - 1, -(2**31)) for x in (queries, keys)]
            queries, keys = (x.astype("i4") for x in ends)
        found = written(problem, tile, queries, keys)
        seen, full = unpacked(found["map"], -(-sizes[1] // tile[1]))
        bounds = [
            tile_states.segment_bounds(np, x, block=n)
            for x, n in zip((queries, keys), tile, strict=True)
        ]
        states = tile_states.of_segments(np, *bounds, block=tile[1], kv_len=sizes[1])
        np.testing.assert_array_equal(seen[:, 0], states != tile_states.EMPTY)
        whole = slice(sizes[1] // tile[1])  # others are never full to tile_states
        np.testing.assert_array_equal(
            full[:, 0, :, whole], (states == tile_states.FULL)[..., whole]
        )
        allowed = (queries[:, :, None] == keys[:, None])[:, None]
        np.testing.assert_array_equal(full, tiles_of(allowed, tile, np.all))
