"""Fragments through registers: threads read the entries that a copy wrote for them."""

import itertools

import numpy as np
import pytest

from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import simulate
from tracea_jax.ir.lanes import WGMMA_TF32_A
from tracea_jax.ir.register_operand import fragment_byte, paired_column

pytestmark = pytest.mark.once

STAGE_K, SLABS = 32, 2


def copied(tile):
    """A (k, m) tile in shared memory, in words: slabs of 32 columns, swizzled rows.

    Chunk c of row k goes to chunk c ^ (k mod 8): stated on its own, in chunks.
    """
    slabs = tile.reshape(STAGE_K, -1, 8, 4).transpose(1, 0, 2, 3)
    memory = np.empty_like(slabs)
    for k, chunk in itertools.product(range(STAGE_K), range(8)):
        memory[:, k, chunk ^ (k % 8)] = slabs[:, k, chunk]
    return memory.reshape(-1)


@pytest.mark.parametrize("paired", [False, True])
def test_fragments_are_the_tile_with_its_columns_permuted(paired):
    tile = np.arange(STAGE_K * 64 * SLABS).reshape(STAGE_K, 64 * SLABS)
    memory = copied(tile)
    order = [paired_column(row) if paired else row for row in range(64)]
    for slab, step in itertools.product(range(SLABS), range(STAGE_K // 8)):
        expected = tile[8 * step : 8 * step + 8, 64 * slab : 64 * slab + 64][:, order].T
        for thread, i in WGMMA_TF32_A.positions():
            byte = fragment_byte(thread, slab, step, i, paired=paired)
            assert memory[byte // 4] == expected[WGMMA_TF32_A(thread, i)]


def test_paired_columns_are_a_permutation_of_neighbours():
    assert sorted(map(paired_column, range(64))) == list(range(64))
    for row in range(64):
        if row % 16 < 8:
            assert paired_column(row) % 2 == 0
            assert paired_column(row + 8) == paired_column(row) + 1


@pytest.mark.parametrize("warp", range(4))
def test_pairs_are_read_without_conflicts_and_single_words_twice(warp):
    thread = LANE + 32 * warp
    for first in (0, 2):
        pairs = fragment_byte(thread, 0, 0, first, paired=True)
        assert simulate(pairs, width=8).is_free
    for i in range(4):
        words = fragment_byte(thread, 0, 0, i, paired=False)
        assert simulate(words, width=4).degrees == (2,)
