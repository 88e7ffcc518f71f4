"""The schedule of ring attention: each score once, on the device that has both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tracea_jax.ops.attention.ring.plan import (
    ORDERS,
    Window,
    chunks,
    longest,
    plan,
)

pytestmark = pytest.mark.once

CAUSAL = Window(right=0)
WINDOWS = [
    Window(),
    CAUSAL,
    Window(left=3, right=0),
    Window(left=9, right=4),
    Window(left=2),
    Window(left=-2, right=5),
    Window(right=-1),
    Window(left=1, right=-3),
    Window(left=20, right=0),
]


def seen(window, queries, keys):
    """Which keys each query sees."""
    ahead = np.arange(keys)[None] - np.arange(queries)[:, None]
    left = queries if window.left is None else window.left
    right = keys if window.right is None else window.right
    return (ahead >= -left) & (ahead <= right)


def positions(order, rank, devices, length):
    found = [
        np.arange(c.position, c.position + c.size)
        for c in chunks(order, rank, devices, length)
    ]
    return np.concatenate(found)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_each_score_that_is_seen_is_computed_once(order, window):
    for devices, q_len, kv_len in itertools.product((1, 2, 3, 8), (1, 2, 7), (1, 6)):
        whole = window.within(devices * q_len, devices * kv_len)
        counts = np.zeros((devices * q_len, devices * kv_len), int)
        for step in plan(order, devices, q_len, kv_len, whole):
            for rank in range(devices):
                source = (rank - step.shift) % devices
                rows = positions(order, rank, devices, q_len)
                columns = positions(order, source, devices, kv_len)
                for block in step.of(rank):
                    sees = seen(block.window, *block.shape)
                    assert sees.any() and sees.sum() == block.scores
                    assert block.hides_rows == (not sees.any(1).all())
                    own = rows[slice(*block.queries)], columns[slice(*block.keys)]
                    counts[np.ix_(*own)] += sees
        expected = seen(window, *counts.shape)
        np.testing.assert_array_equal(counts, expected)
        assert whole.hides_rows(*counts.shape) == (not expected.any(1).all())


@pytest.mark.parametrize("order", ORDERS)
def test_devices_have_every_position_once_in_increasing_order(order):
    for devices, length in itertools.product((1, 2, 5), (1, 2, 7)):
        held = [positions(order, r, devices, length) for r in range(devices)]
        assert all(len(h) == length and (np.diff(h) > 0).all() for h in held)
        assert sorted(np.concatenate(held)) == list(range(devices * length))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("length", [1024, 1023])
def test_causal_work_is_equal_in_every_step_of_zigzag_order(devices, length):
    steps = plan("zigzag", devices, length, length, CAUSAL)
    assert [step.shift for step in steps] == list(range(devices))
    for step in steps:
        work = [sum(b.scores for b in step.of(r)) for r in range(devices)]
        assert max(work) <= 1.02 * np.mean(work)
        # One call each, of which all but the first have no mask.
        assert {len(case) for case in step.cases} == {1}
        assert {b.window for (b,) in step.cases} == {Window() if step.shift else CAUSAL}
    total = devices * length
    assert longest(steps) <= 1.02 * total * (total + 1) / 2 / devices


def test_contiguous_order_leaves_causal_work_unequal():
    steps = plan("contiguous", 4, 64, 64, CAUSAL)
    work = [sum(b.scores for s in steps for b in s.of(r)) for r in range(4)]
    assert work == [64 * 65 // 2 + 64**2 * r for r in range(4)]
    assert longest(steps) == work[-1]


def test_steps_that_a_window_empties_are_left_out():
    steps = plan("contiguous", 8, 16, 16, Window(left=20, right=0))
    assert [step.shift for step in steps] == [0, 1, 2]
    both = plan("contiguous", 8, 16, 16, Window(left=16, right=1))
    assert [step.shift for step in both] == [0, 1, 7]
