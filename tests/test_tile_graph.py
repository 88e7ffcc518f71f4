"""Block ranges of positions and lengths: equal to dense masks, on the device too."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from device_code import compiles_device_code

from tracea_jax.ir.tile_graph import BlockRange, KeyInterval
from tracea_jax.runtime import nvrtc

pytestmark = pytest.mark.once

WINDOWS = [
    (left, right)
    for left, right in itertools.product((None, 0, 1, 5, 23, -3), (None, 0, 4, 17, -6))
]


def dense(keys: KeyInterval, queries: int) -> np.ndarray:
    """The rule as a mask, from its definition."""
    i, j = np.arange(queries)[:, None], np.arange(keys.kv_len)[None, :]
    allowed = j < keys.limit
    if keys.left is not None:
        allowed = allowed & (i - keys.left <= j)
    if keys.right is not None:
        allowed = allowed & (j <= i + keys.right)
    return np.broadcast_to(allowed, (queries, keys.kv_len))


def tiles_of(queries: int, tile: int):
    return [(q, min(q + tile, queries) - 1) for q in range(0, queries, tile)]


@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize(("kv_len", "limit"), [(37, 37), (32, 32), (40, 21), (1, 1)])
def test_blocks_are_those_of_the_dense_mask(kv_len, limit, left, right):
    keys = KeyInterval(kv_len=kv_len, limit=limit, left=left, right=right)
    queries = 45
    mask = dense(keys, queries)
    for tile, block in itertools.product((4, 6, 16), (4, 8, 10)):
        for first, last in tiles_of(queries, tile):
            found = keys.blocks(first, last, block)
            rows = mask[first : last + 1]
            is_blind = not rows.any(1).all()
            assert keys.has_blind(first, last) == is_blind
            # Where blind queries are looked after in another way, none is lost.
            others = keys.seen_blocks(first, last, block)
            assert is_blind or others == found
            for n in range(-(-kv_len // block)):
                part = rows[:, n * block : (n + 1) * block]
                assert not part.any() or others.first <= n < others.last
                assert not others.is_full(n) or part.all()
            assert 0 <= found.first <= found.full_first <= found.full_last <= found.last
            for n in range(-(-kv_len // block)):
                part = rows[:, n * block : (n + 1) * block]
                is_seen = is_blind or part.any()
                # A block that reaches behind the last key is partial: it has a mask.
                is_full = not is_blind and part.all() and part.shape[1] == block
                assert (found.first <= n < found.last) == is_seen
                assert found.is_full(n) == (is_full and is_seen)
            assert found.last <= -(-kv_len // block)


def test_no_key_may_be_seen():
    keys = KeyInterval(kv_len=20, limit=0)
    assert keys.blocks(0, 15, 8) == BlockRange(
        first=0, last=3, full_first=0, full_last=0
    )


@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_blind_queries_may_ask_for_no_block(left, right):
    """Also with queries and keys in each other's place, as the backward pass asks."""
    keys = KeyInterval(kv_len=40, limit=29, left=left, right=right)
    queries = KeyInterval(kv_len=45, limit=45, left=right, right=left)
    allowed = dense(keys, 45)
    for rule, mask, count in ((keys, allowed, 45), (queries, allowed[:, :29].T, 29)):
        for first, last in tiles_of(count, 16):
            found = rule.seen_blocks(first, last, 8)
            for block in range(-(-mask.shape[1] // 8)):
                part = mask[first : last + 1, 8 * block : 8 * block + 8]
                assert not part.any() or found.first <= block < found.last
                is_full = part.all() and part.shape[1] == 8
                assert found.is_full(block) == is_full


def test_a_causal_tile_has_the_diagonal_as_its_only_partial_block():
    keys = KeyInterval(kv_len=4096, limit=4096, right=0)
    for tile in range(32):
        found = keys.blocks(128 * tile, 128 * tile + 127, 128)
        assert (found.first, found.last) == (0, tile + 1)
        assert (found.full_first, found.full_last) == (0, tile)


def test_what_a_window_leaves_does_not_grow_with_the_length():
    keys = KeyInterval(kv_len=1 << 17, limit=1 << 17, left=1023, right=0)
    counts = {keys.blocks(q, q + 127, 128).count for q in range(1024, 1 << 17, 128)}
    assert counts == {9}


def claims() -> list[str]:
    """Device code that computes the same ranges, in static assertions."""
    lines = []
    lengths = ((37, 37), (40, 21), (40, 0))
    for (left, right), (kv_len, limit) in itertools.product(WINDOWS, lengths):
        keys = KeyInterval(kv_len=kv_len, limit=limit, left=left, right=right)
        flags = ", ".join(str(side is not None).lower() for side in (left, right))
        sides = f"{left or 0}, {right or 0}"
        on_device = f"KeyInterval<{flags}>{{{kv_len}, {limit}, {sides}}}"
        for first, last in tiles_of(45, 16):
            r = keys.blocks(first, last, 8)
            here = f"{on_device}.blocks({first}, {last}, 8)"
            fields = {f: getattr(r, f) for f in ("first", "last", "full_first")}
            fields["full_last"] = r.full_last
            others = keys.seen_blocks(first, last, 8)
            on_seen = f"{on_device}.seen_blocks({first}, {last}, 8)"
            lines.append(
                f"static_assert({on_seen}.first == {others.first} && "
                f"{on_seen}.last == {others.last} && "
                f"{on_seen}.full_last == {others.full_last});"
            )
            equal = " && ".join(f"{here}.{f} == {n}" for f, n in fields.items())
            lines.append(f'static_assert({equal}, "{sides} of {limit}");')
            seen = keys.seen_blocks(first, last, 8)
            fields = [f.name for f in dataclasses.fields(seen)]
            here_seen = here.replace(".blocks(", ".seen_blocks(")
            lines += [
                f"static_assert({here_seen}.{f} == {getattr(seen, f)});" for f in fields
            ]
            lines.append(f"static_assert({here}.count() == {r.count});")
            lines += [
                f"static_assert({here}.is_full({n}) == {str(r.is_full(n)).lower()});"
                for n in range(5)
            ]
    return lines


@pytest.mark.nvrtc
def test_the_device_computes_the_same_ranges():
    assert compiles_device_code("tile/key_range.cuh", claims())


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("query - left : 0", "query - left + 1 : 0"),
        ("? query + right + 1 : limit", "? query + right : limit"),
        ("end(last) <= begin(last)", "false"),
        ("end(first) <= begin(first) ||", ""),
        ("to = ceil_div(end(last), block)", "to = end(last) / block"),
        ("full_from = ceil_div(begin(last), block)", "full_from = from"),
        ("full_to = end(first) / block", "full_to = to"),
        ("{from, to, from, from}", "{from, to, full_from, full_to}"),
        ("{0, ceil_div(kv_len, block), 0, 0}", "{1, 1, 0, 0}"),
        ("block >= full_first &&", ""),
        ("return last - first", "return last"),
    ],
)
def test_a_wrong_range_is_found(right, wrong):
    with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
        compiles_device_code("tile/key_range.cuh", claims(), change=(right, wrong))
