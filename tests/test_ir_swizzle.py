"""Swizzle algebra by brute force, and the choice of a swizzle for a row stride."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import simulate
from tracea_jax.ir.swizzle import (
    NO_SWIZZLE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    Swizzle,
    conflict_free_swizzle,
)

pytestmark = pytest.mark.once

ALL = [Swizzle(*parts) for parts in itertools.product(range(4), range(3), range(5))]


def column_degree(swizzle, row_bytes, *, chunk=0, first_row=0):
    """Conflict degree of reading one 16-byte chunk of each of eight rows."""
    start = first_row * row_bytes + 16 * chunk
    read = simulate(lambda i: swizzle(start + i * row_bytes), width=16, lanes=8)
    return read.worst


@pytest.mark.parametrize("swizzle", ALL, ids=str)
def test_claims_against_enumeration(swizzle):
    space = range(1 << (swizzle.base + swizzle.shift + swizzle.bits + 1))
    image = [swizzle(a) for a in space]
    assert swizzle.is_bijective == (sorted(image) == list(space))
    assert swizzle.is_involution == all(swizzle(b) == a for a, b in enumerate(image))


@pytest.mark.parametrize("swizzle", [s for s in ALL if s.is_bijective], ids=str)
def test_period_is_the_least_that_is_at_least_a_chunk(swizzle):
    def repeats(period):
        return all(
            swizzle(a + period) == swizzle(a) + period
            for a in range(4 * swizzle.period_bytes)
        )

    assert repeats(swizzle.period_bytes)
    smaller = [1 << i for i in range(swizzle.base, 12)]
    assert not any(repeats(p) for p in smaller if p < swizzle.period_bytes)


def test_a_chunk_stays_together():
    for swizzle in (SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B):
        starts = range(0, 2048, 16)
        assert all(swizzle(a + i) == swizzle(a) + i for a in starts for i in range(16))


@pytest.mark.parametrize(
    "row_bytes, bits, shift, plain_degree, degree_with_shift_3",
    [
        (16, 0, 3, 1, 1),
        (32, 1, 3, 2, 1),
        (64, 2, 3, 4, 1),
        (128, 3, 3, 8, 1),
        (256, 3, 4, 8, 2),
        (512, 3, 5, 8, 4),
        (1024, 3, 6, 8, 8),
        (2048, 3, 7, 8, 8),
    ],
)
def test_textbook_row_strides(
    row_bytes, bits, shift, plain_degree, degree_with_shift_3
):
    swizzle = conflict_free_swizzle(row_bytes)
    assert swizzle == Swizzle(bits, 4, shift)
    for chunk in range(row_bytes // 16):
        assert column_degree(NO_SWIZZLE, row_bytes, chunk=chunk) == plain_degree
        assert column_degree(swizzle, row_bytes, chunk=chunk) == 1
        near = Swizzle(bits, 4, 3)
        assert column_degree(near, row_bytes, chunk=chunk) == degree_with_shift_3


@given(st.integers(1, 160), st.integers(0, 64), st.data())
def test_any_row_stride_is_free_of_conflicts(chunks, first_row, data):
    row_bytes, chunk = 16 * chunks, data.draw(st.integers(0, chunks - 1))
    swizzle = conflict_free_swizzle(row_bytes)
    degree = column_degree(swizzle, row_bytes, chunk=chunk, first_row=first_row)
    assert degree == 1


@pytest.mark.parametrize("chunks", range(1, 20))
def test_padding_is_free_of_conflicts_iff_the_stride_is_an_odd_number_of_chunks(chunks):
    assert (column_degree(NO_SWIZZLE, 16 * chunks) == 1) == (chunks % 2 == 1)


def test_padding_and_swizzle_together_conflict():
    assert column_degree(NO_SWIZZLE, 144) == 1
    assert column_degree(SWIZZLE_128B, 144) == 8


def test_tensor_map_modes():
    modes = (NO_SWIZZLE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B)
    assert [mode.tensor_map_mode() for mode in modes] == [0, 1, 2, 3]
    assert [mode.period_bytes for mode in modes] == [16, 256, 512, 1024]
    with pytest.raises(ValueError, match=r"Swizzle\(3, 4, 4\) is no tensor map mode"):
        Swizzle(3, 4, 4).tensor_map_mode()


def test_device_type():
    assert SWIZZLE_128B(17 * 16) == 304
    assert SWIZZLE_128B.cxx() == "tracea::Swizzle<3, 4, 3>"
    for bad in (Swizzle(3, 4, 2), Swizzle(0, 4, 0)):
        with pytest.raises(ValueError, match="shift >= max"):
            bad.cxx()


@given(st.sampled_from(ALL), st.integers(0, 31))
def test_of_an_expression_it_is_an_expression(swizzle, lane):
    assert swizzle(LANE * 48 + 7)(lane) == swizzle(lane * 48 + 7)


@pytest.mark.parametrize("parts", [(-1, 4, 3), (3, -4, 3), (3, 4, -3), (8, 16, 8)])
def test_impossible_parts(parts):
    with pytest.raises(ValueError, match="must be at"):
        Swizzle(*parts)


@pytest.mark.parametrize("row_bytes", [0, -16, 8, 100])
def test_impossible_row_strides(row_bytes):
    with pytest.raises(ValueError, match="positive multiple of 16"):
        conflict_free_swizzle(row_bytes)
