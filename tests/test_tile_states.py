"""States of tiles: sound and, where they can be, exact, against masks of all scores."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from tracea_jax.ir import tile_states
from tracea_jax.ir.tile_graph import KeyInterval, TileGraph
from tracea_jax.ir.tile_states import EMPTY, FULL, PARTIAL

pytestmark = pytest.mark.once

SIZES = st.integers(1, 23)
BLOCKS = st.tuples(st.integers(1, 9), st.integers(1, 9))


def by_looking(mask, block):
    """The states from their definition."""
    rows, keys = block
    return [
        [
            state_of(mask[i : i + rows, j : j + keys], keys)
            for j in range(0, mask.shape[1], keys)
        ]
        for i in range(0, mask.shape[0], rows)
    ]


def state_of(tile, keys):
    if not tile.any():
        return EMPTY
    return FULL if tile.all() and tile.shape[1] == keys else PARTIAL


@st.composite
def masks(draw):
    return draw(hnp.arrays(bool, (draw(SIZES), draw(SIZES))))


@hypothesis.given(masks(), BLOCKS)
def test_states_of_a_mask(mask, block):
    assert tile_states.of_mask(np, mask, block=block).tolist() == by_looking(
        mask, block
    )


@st.composite
def ids(draw):
    length, kv_len = draw(SIZES), draw(SIZES)
    some = st.integers(-3, 5)
    q, k = (draw(hnp.arrays(np.int32, (1, n), elements=some)) for n in (length, kv_len))
    if draw(st.booleans()):
        q, k = np.sort(q), np.sort(k)
    return q, k


def states_of(module, q, k, block):
    bounds = (
        tile_states.segment_bounds(module, module.asarray(x), block=n)
        for x, n in zip((q, k), block, strict=True)
    )
    return tile_states.of_segments(module, *bounds, block=block[1], kv_len=k.shape[1])[
        0
    ]


@hypothesis.given(ids(), BLOCKS)
def test_states_of_segments_are_sound(pair, block):
    q, k = pair
    found = states_of(np, q, k, block)
    exact = np.array(by_looking(q[0][:, None] == k[0], block))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found == FULL, exact == FULL)
    assert (exact[found == EMPTY] == EMPTY).all()


@hypothesis.given(hnp.arrays(np.int32, (1, 23), elements=st.integers(0, 5)), BLOCKS)
def test_states_of_packed_documents_are_exact(q, block):
    q = np.sort(q)
    q = np.cumsum(np.diff(q, prepend=q[:, :1]) > 0, axis=1)  # numbered without gaps
    exact = by_looking(q[0][:, None] == q[0], block)
    assert states_of(np, q, q, block).tolist() == exact


@hypothesis.given(masks(), st.integers(1, 9), SIZES)
def test_states_of_blocks_are_those_of_the_scores_they_stand_for(blocks, rows, keys):
    kv_len = blocks.shape[1] * keys - keys // 2  # the last block may be short
    dense = np.repeat(np.repeat(blocks, rows, axis=0), keys, axis=1)[:, :kv_len]
    block = (rows, keys)
    found = tile_states.of_blocks(np, blocks, block=block, kv_len=kv_len)
    assert found.tolist() == by_looking(dense, block)


def test_the_device_computes_the_same():
    rng = np.random.default_rng(0)
    mask = rng.random((2, 3, 21, 34)) < 0.9
    states = [tile_states.of_mask(m, m.asarray(mask), block=(4, 8)) for m in (np, jnp)]
    np.testing.assert_array_equal(*states)
    assert {EMPTY, PARTIAL, FULL} >= set(np.unique(states[0])) and states[0].any()
    q, k = (np.sort(rng.integers(0, 6, (1, n)), axis=1) for n in (21, 34))
    found = [states_of(module, q, k, (4, 8)) for module in (np, jnp)]
    np.testing.assert_array_equal(*found)


# --- graphs ---------------------------------------------------------------------------


@hypothesis.given(masks(), BLOCKS)
def test_a_graph_knows_its_tiles(mask, block):
    graph = TileGraph.from_mask(mask, block)
    states = tile_states.of_mask(np, mask, block=block)
    np.testing.assert_array_equal(graph.array, states)
    assert graph.computed == np.count_nonzero(states)
    assert graph.partial == (states == PARTIAL).sum()
    for row, line in enumerate(states):
        assert graph.seen(row) == tuple(np.flatnonzero(line))
    assert hash(graph) == hash(TileGraph.from_mask(mask.copy(), block))


@hypothesis.given(masks(), BLOCKS, st.randoms(use_true_random=False))
def test_what_two_masks_leave(mask, block, random):
    other = np.array([[random.random() < 0.7 for _ in row] for row in mask])
    both = TileGraph.from_mask(mask, block) & TileGraph.from_mask(other, block)
    exact = TileGraph.from_mask(mask & other, block).array
    np.testing.assert_array_equal(both.array == FULL, exact == FULL)
    assert (exact[both.array == EMPTY] == EMPTY).all()


@pytest.mark.parametrize(("left", "right"), [(None, 0), (5, 2), (0, None), (3, -2)])
def test_intervals_have_the_states_of_their_masks(left, right):
    keys = KeyInterval(kv_len=37, limit=33, left=left, right=right)
    i, j = np.arange(30)[:, None], np.arange(37)
    mask = (j < 33) & (j <= i + (99 if right is None else right))
    mask &= j >= i - (99 if left is None else left)
    found = keys.states(30, (4, 8))
    exact = tile_states.of_mask(np, mask, block=(4, 8))
    sees = np.add.reduceat(mask.any(1), range(0, 30, 4)) == [4] * 7 + [2]
    np.testing.assert_array_equal(found[sees], exact[sees])
    assert (found[~sees] == PARTIAL).all()


def test_pictures():
    graph = TileGraph.from_mask(np.tril(np.ones((8, 12), bool)), (2, 2))
    assert str(graph) == (
        "8 queries x 12 keys in tiles of 2 x 2: 10 of 24 computed, 4 of them partial\n"
        "\n"
        "+------+\n|/     |\n|#/    |\n|##/   |\n|###/  |\n+------+"
    )
    assert repr(graph) == str(graph)
    assert "<pre>+------+\n|/     |" in graph._repr_html_()
    wide = TileGraph.from_mask(np.tril(np.ones((200, 200), bool)), (1, 1))
    lines = str(wide).splitlines()[2:]
    assert len(lines) == 52 and lines[1] == f"|/{' ' * 49}|"  # four tiles a sign
    with pytest.raises(ValueError, match="cannot be combined"):
        _ = graph & wide
