"""masks: what they allow and show, against boolean arrays over all scores."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import qkv
from numerics import normal

import tracea_jax as tracea
from tracea_jax import masks
from tracea_jax.ir.tile_states import EMPTY, FULL
from tracea_jax.ops import attention
from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.reference import Spec

pytestmark = pytest.mark.once

B, T, S = 2, 6, 5
ROWS, J = np.arange(T)[:, None], np.arange(S)
rng = np.random.default_rng(0)
Q_IDS, KV_IDS = rng.integers(0, 2, (B, T)), rng.integers(0, 2, (S,))
OWN = rng.integers(0, 3, (T,))
ARRAY = rng.random((B, 1, T, S)) < 0.8
BLOCKS = np.array([[True, False], [True, True], [False, True]])
LENGTHS = np.array([4, 5], np.int32)

# Each part, and what it is as an array (batch, heads, queries, keys).
PARTS = {
    "causal": (masks.causal(), J <= ROWS),
    "window": (masks.window(3, 1), (J >= ROWS - 3) & (J <= ROWS + 1)),
    "narrow": (masks.window(1), abs(ROWS - J) <= 1),
    "segments": (
        masks.segments(Q_IDS, KV_IDS),
        (Q_IDS[:, :, None] == KV_IDS)[:, None],
    ),
    "more segments": (
        masks.segments(OWN.astype(np.int8), OWN[:S].astype(np.int8)),
        OWN[:, None] == OWN[:S],
    ),
    "lengths": (masks.lengths(kv=LENGTHS), (J < LENGTHS[:, None])[:, None, None]),
    "one length": (masks.lengths(kv=3), J < 3),
    "array": (masks.from_array(ARRAY), ARRAY),
    "keys": (masks.from_array(jnp.asarray(ARRAY[0, 0, 0])), ARRAY[0, 0, 0]),
    "blocks": (
        masks.block_sparse(BLOCKS, (2, 3)),
        BLOCKS.repeat(2, axis=0).repeat(3, axis=1)[:, :S],
    ),
}
SOME = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4)


def joined(names):
    """The parts as one mask, and as one array."""
    parts = [PARTS[n] for n in names]
    mask = functools.reduce(lambda a, b: a & b, (m for m, _ in parts))
    dense = functools.reduce(np.logical_and, (a for _, a in parts))
    return mask, np.broadcast_to(dense, (B, 1, T, S))


@hypothesis.settings(max_examples=60)
@hypothesis.given(SOME)
def test_what_is_allowed(names):
    mask, dense = joined(names)
    found = mask.arguments(B, T, S)
    spec = Spec(
        scale=1.0, **{n: found[n] for n in ("is_causal", "window", "mask_block")}
    )
    x = {**found, "q": np.empty((B, T, 1, 1)), "k": np.empty((B, S, 1, 1))}
    parts = [definition.allowed(spec, x), definition._of_positions(spec, x)]
    parts.append(definition._of_lengths(x))
    found = functools.reduce(
        np.logical_and, (np.asarray(p) for p in parts if p is not None), True
    )
    np.testing.assert_array_equal(np.broadcast_to(found, dense.shape), dense)


@hypothesis.settings(max_examples=60)
@hypothesis.given(SOME, st.integers(1, 4), st.integers(1, 4))
def test_tiles_that_are_called_empty_are_empty(names, rows, keys):
    mask, dense = joined(names)
    for b in range(B):
        found = mask.tile_graph(T, S, block=(rows, keys), example=b)
        exact = tracea.TileGraph.from_mask(dense[b, 0], (rows, keys))
        assert (exact.array[found.array == EMPTY] == EMPTY).all()
        np.testing.assert_array_equal(found.array == FULL, exact.array == FULL)


def test_each_kind_goes_to_the_primitive_as_what_it_is():
    mask = masks.causal() & masks.window(4, 9) & masks.segments(Q_IDS, KV_IDS)
    mask = mask & masks.lengths(q=T, kv=LENGTHS) & masks.block_sparse(BLOCKS, (2, 3))
    found = mask.arguments(B, T, S)
    assert found["is_causal"] and found["window"] == (4, 9)
    assert found["mask"].shape == (1, 1, 3, 2) and found["mask_block"] == (2, 3)
    np.testing.assert_array_equal(found["q_segments"], Q_IDS)
    assert found["kv_segments"].shape == (B, S)
    assert found["q_lengths"].tolist() == [T, T]
    assert {x.dtype.name for x in jax.tree.leaves(mask)} == {"int32", "bool"}


Q, K, _ = qkv()
V = normal(B, S, 2, 3)


@pytest.mark.parametrize(
    "names",
    [("causal", "segments"), ("segments", "more segments"), ("blocks",), ("lengths",)],
)
def test_attention_takes_them_as_its_mask(names):
    mask, dense = joined(names)
    o = jax.jit(lambda *x: attention(*x[:3], mask=x[3]))(Q, K, V, mask)
    plain = jax.jit(lambda *x: attention(*x[:3], mask=x[3]))(Q, K, V, dense)
    np.testing.assert_allclose(o, plain, atol=2e-6)
    graph = tracea.Graph.from_function(
        lambda *x: attention(*x[:3], mask=x[3]), Q, K, V, mask
    )
    assert ("causal" in str(graph)) == ("causal" in names)
    assert ("segments" in str(graph)) == ("segments" in names)


def test_they_meet_the_other_arguments():
    mask = masks.segments(Q_IDS, KV_IDS)
    settings = {"is_causal": True, "key_value_seq_lengths": LENGTHS}
    found = attention(Q, K, V, mask=mask, **settings)
    both = mask & masks.causal() & masks.lengths(kv=LENGTHS)
    np.testing.assert_array_equal(found, attention(Q, K, V, mask=both))
    again = attention(
        Q,
        K,
        V,
        query_segment_ids=Q_IDS.astype("int32"),
        key_value_segment_ids=KV_IDS.astype("int32"),
        **settings,
    )
    np.testing.assert_array_equal(found, again)
    with pytest.raises(ValueError, match="give both the same from_end"):
        attention(Q, K, V, mask=masks.causal(from_end=True), is_causal=True)


def test_positions_from_the_end_are_those_of_caches():
    mask = masks.causal(from_end=True) & masks.lengths(kv=LENGTHS)
    q = Q[:, :2]
    found = jax.jit(lambda *x: attention(*x, mask=mask))(q, K, V)
    dense = J <= np.arange(2)[:, None] + LENGTHS[:, None, None] - 2
    plain = jax.jit(lambda *x: attention(*x, mask=dense[:, None]))(q, K, V)
    np.testing.assert_allclose(found, plain, atol=2e-6)
    graph = mask.tile_graph(2, S, block=(1, 1), example=0)
    assert graph.states == (b"\2\2\2\0\0", b"\2\2\2\2\0")


def test_new_ids_compile_nothing_again_and_are_mapped():
    traces = []

    @jax.jit
    def f(q, mask):
        traces.append(1)
        return attention(q, K, K, mask=mask)

    for ids in (Q_IDS, 1 - Q_IDS):
        f(Q, masks.segments(ids, KV_IDS))
    assert len(traces) == 1
    one = lambda q, k, m: attention(q, k, k, mask=m)  # noqa: E731
    ids = masks.segments(Q_IDS, np.tile(KV_IDS, (B, 1)))
    found = jax.vmap(one)(Q, K, ids & masks.causal())
    whole = attention(Q, K, K, mask=ids & masks.causal())
    np.testing.assert_allclose(found, whole, atol=2e-6)


# --- in print -------------------------------------------------------------------------


def test_pictures():
    assert str(masks.causal()).splitlines()[4:7] == [
        "+----------------+",
        "|/               |",
        "|#/              |",
    ]
    ids = masks.segments(np.repeat(np.arange(4), 128))
    lines = repr(ids & masks.causal()).splitlines()
    assert lines[0] == "mask: causal & segments"
    assert lines[2] == (
        "512 queries x 512 keys in tiles of 32 x 32: 40 of 256 computed, 16 of them "
        "partial"
    )
    assert lines[9] == "|    /           |"
    assert "<pre>" in ids._repr_html_()


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"),
    [
        (masks.segments(Q_IDS, KV_IDS) & masks.block_sparse(BLOCKS, (2, 3)), T, S),
        (masks.segments(OWN[:1], KV_IDS), 1, S),
        (masks.from_array(ARRAY[0, 0, 0]) & masks.lengths(kv=3), S, S),
        (masks.block_sparse(BLOCKS, (2, 3)) & masks.lengths(kv=9), T, 6),
        (masks.lengths(q=4, kv=9), 4, 9),
        (masks.causal(), 2048, 2048),
    ],
)
def test_a_picture_has_the_lengths_that_the_parts_tell(mask, q_len, kv_len):
    assert f"{q_len} queries x {kv_len} keys" in str(mask)


def test_texts_of_what_is_not_known():
    found = []
    jax.jit(lambda m: found.append(str(m)))(
        masks.segments(Q_IDS) & masks.window(2, from_end=True) & masks.lengths(3, 4)
    )
    assert found == [
        "mask: window of 2 before and 2 behind & positions from the end & segments & "
        "lengths of queries & lengths of keys"
    ]
    assert str(masks.block_sparse(BLOCKS)).startswith("mask: array 3x2 of 128x128 bl")

    both = masks.segments(OWN) & masks.block_sparse(BLOCKS, (4, 4))
    assert str(both) == (
        "mask: segments & array 3x2 of 4x4 blocks\n\nan array of 4x4 blocks that ends "
        "in 3x2 does not fit 6 queries and 6 keys, which need 2x2"
    )

    @jax.jit
    def tiles(mask):
        with pytest.raises(ValueError, match="has no tiles yet"):
            mask.tile_graph(T)

    tiles(masks.lengths(kv=3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.segments(np.zeros(4)), "ids must be integers of up to 32 bits"),
        (lambda: masks.segments(np.array([1 << 40])), "not int64 of shape"),
        (lambda: masks.segments(OWN, np.zeros((1, 1, 4), int)), "kv_ids must be"),
        (lambda: masks.lengths(kv=1.5), "kv must be integers of shape"),
        (lambda: masks.from_array(np.zeros((2, 2))), "mask must be boolean with 1 to"),
        (lambda: masks.block_sparse(BLOCKS, (0, 1)), "must be two positive numbers"),
        (
            lambda: attention(Q, K, V, mask=masks.segments(OWN)),
            r"segment ids must have shape \(2, 5\) or \(5,\)",
        ),
        (
            lambda: attention(Q, K, V, mask=masks.lengths(kv=np.array([1, 2, 3]))),
            r"lengths must have shape \(2,\)",
        ),
        (
            lambda: attention(Q, K, V, mask=masks.block_sparse(BLOCKS, (3, 3))),
            r"mask must broadcast to .* = \(2, 4, 2, 2\)",
        ),
        (
            lambda: attention(
                Q, K, V, mask=masks.block_sparse(BLOCKS) & masks.from_array(ARRAY)
            ),
            "need 1 entries for 6 positions; there are 3",
        ),
        (
            lambda: masks.from_array(ARRAY).tile_graph(T, 2 * S),
            "array that ends in 6x5 does not fit 6 queries and 10 keys, .* need 6x10",
        ),
        (
            lambda: masks.from_array(ARRAY[..., :1, :]).tile_graph(T, S - 1),
            "array that ends in 1x5 does not fit 6 queries and 4 keys, .* need 6x4",
        ),
        (
            lambda: masks.block_sparse(BLOCKS, (2, 3)).tile_graph(2 * T, S),
            "2x3 blocks that ends in 3x2 does not fit 12 queries and 5 keys, .* 6x2",
        ),
        (
            lambda: masks.segments(Q_IDS, KV_IDS).tile_graph(T),
            "ids of 6 queries and 5 keys do not fit 6 queries and 6 keys",
        ),
        (
            lambda: masks.lengths(kv=LENGTHS).tile_graph(T, S, example=B),
            "the mask has 2 examples; there is no example 2",
        ),
        (
            lambda: masks.from_array(ARRAY.swapaxes(0, 1)).tile_graph(T, S, head=-1),
            "the mask has 2 heads; there is no head -1",
        ),
    ],
)
def test_errors_say_what_came_and_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()
