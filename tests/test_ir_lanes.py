"""Fragment maps against the register descriptions of the PTX ISA."""

import dataclasses

import pytest

from tracea_jax.ir.address import LANE
from tracea_jax.ir.lanes import (
    MMA_A,
    MMA_B,
    MMA_C,
    mma_a_col,
    wgmma_accumulator,
    wgmma_accumulator_row,
)

pytestmark = pytest.mark.once


def ptx_a(lane, i):
    group, thread = lane >> 2, lane % 4
    row = group if i in (0, 1, 4, 5) else group + 8
    return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)


def ptx_b(lane, i):
    group, thread = lane >> 2, lane % 4
    return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group


def ptx_c(lane, i):
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


@pytest.mark.parametrize(
    "fragment, ptx", [(MMA_A, ptx_a), (MMA_B, ptx_b), (MMA_C, ptx_c)]
)
def test_mma_fragments(fragment, ptx):
    for lane, i in fragment.positions():
        assert fragment(lane, i) == ptx(lane, i)


def test_two_adjacent_c_fragments_are_one_a_fragment():
    """Why a 16-bit P of attention feeds the second product without a shuffle."""
    for lane, i in MMA_A.positions():
        row, col = MMA_C(lane, i % 4)
        assert MMA_A(lane, i) == (row, col + 8 * (i // 4))


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_wgmma_accumulator_is_c_fragments_of_four_warps(n):
    fragment = wgmma_accumulator(n)
    assert (fragment.rows, fragment.cols) == (64, n)
    for thread, i in fragment.positions():
        row, col = MMA_C(thread % 32, i % 4)
        assert fragment(thread, i) == (row + 16 * (thread // 32), col + 8 * (i // 4))


@pytest.mark.parametrize("n", [0, 4, 20, 264])
def test_impossible_wgmma_widths(n):
    with pytest.raises(ValueError, match="multiple of 8 in 8 .. 256"):
        wgmma_accumulator(n)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"row": lambda lane, i: lane // 4}, "is held by"),
        ({"col": lambda lane, i: lane % 4 * 2 + i}, "outside of 16 x 8"),
        ({"row": lambda lane, i: -1}, "outside of 16 x 8"),
        ({"registers": 2}, "64 registers for 16 x 8"),
        ({"rows": 32}, "128 registers for 32 x 8"),
    ],
)
def test_what_is_no_bijection_cannot_be_made(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MMA_C, **change)


def test_formulas_take_expressions():
    for i in range(8):
        row, col = wgmma_accumulator_row(LANE, i), mma_a_col(LANE, i)
        for lane in range(128):
            assert row(lane) == wgmma_accumulator_row(lane, i)
            assert col(lane) == mma_a_col(lane, i)
