"""The bank-conflict simulator against the textbook."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import simulate, verified
from tracea_jax.ir.swizzle import SWIZZLE_128B

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "address, width, degrees",
    [
        (LANE * 128, 4, (32,)),  # down a column of 128-byte rows
        (LANE * 132, 4, (1,)),  # the same, rows padded by one word
        (LANE * 0, 4, (1,)),  # one word for all: a broadcast
        (LANE // 2 * 4, 4, (1,)),  # pairs share a word
        (LANE * 4, 4, (1,)),
        (LANE * 8, 4, (2,)),  # stride of two words
        (LANE * 12, 4, (1,)),  # an odd stride visits every bank
        (LANE % 2 * 128, 4, (2,)),  # two words of one bank
        (LANE * 2, 2, (1,)),  # two elements in a word
        (LANE * 64, 2, (16,)),
        (LANE, 1, (1,)),
        (LANE * 8, 8, (1, 1)),
        (LANE * 16, 8, (2, 2)),
        (LANE * 128, 8, (16, 16)),
        (LANE * 16, 16, (1, 1, 1, 1)),
        (LANE * 32, 16, (2, 2, 2, 2)),
        (LANE * 128, 16, (8, 8, 8, 8)),
        (SWIZZLE_128B(LANE * 128), 16, (1, 1, 1, 1)),
        (LANE * 144, 16, (1, 1, 1, 1)),
        (LANE // 8 * 16, 16, (1, 1, 1, 1)),  # each phase reads one chunk
    ],
    ids=lambda value: value.cxx() if hasattr(value, "cxx") else None,
)
def test_textbook(address, width, degrees):
    conflicts = simulate(address, width=width)
    assert conflicts.degrees == degrees
    assert conflicts.cost == sum(degrees)
    assert conflicts.ideal == len(degrees)
    assert conflicts.is_free == (set(degrees) == {1})


@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_each_matrix_of_ldmatrix_is_a_phase(matrices):
    plain = simulate(LANE * 128, width=16, lanes=8 * matrices)
    assert plain.degrees == (8,) * matrices
    swizzled = simulate(SWIZZLE_128B(LANE * 128), width=16, lanes=8 * matrices)
    assert swizzled.degrees == (1,) * matrices


@given(st.lists(st.integers(0, 4095), min_size=32, max_size=32), st.randoms())
def test_order_and_whole_lines_do_not_matter(words, rng):
    degrees = simulate(lambda lane: 4 * words[lane], width=4).degrees
    moved = simulate(lambda lane: 4 * words[lane] + 128 * 5, width=4).degrees
    shuffled = rng.sample(words, 32)
    assert moved == degrees
    assert simulate(lambda lane: 4 * shuffled[lane], width=4).degrees == degrees


@given(st.lists(st.integers(0, 511), min_size=32, max_size=32))
def test_bounds(words):
    """Between all words spread over the banks evenly and all in one bank."""
    distinct = len(set(words))
    (degree,) = simulate(lambda lane: 4 * words[lane], width=4).degrees
    assert -(-distinct // 32) <= degree <= min(distinct, 512 // 32)


def test_verified_is_the_same_object():
    address = SWIZZLE_128B(LANE * 128)
    assert verified(address, width=16) is address
    with pytest.raises(ValueError, match=r"32 transactions for 4 .*must be 1"):
        verified(LANE * 128, width=16)


def test_impossible_accesses():
    with pytest.raises(ValueError, match="lane 1 accesses 16 bytes at 8"):
        simulate(LANE * 8, width=16)
    with pytest.raises(ValueError, match="width=3 must be one of"):
        simulate(LANE, width=3)
    for lanes in (0, 33):
        with pytest.raises(ValueError, match=f"lanes={lanes} must be in 1 .. 32"):
            simulate(LANE * 4, width=4, lanes=lanes)
