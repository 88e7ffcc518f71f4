"""The order in which blocks of the Hopper kernel compute the tiles of a product.

The model of kernels/cuda/tile/scheduler.cuh, with which tests compare its formulas.
"""

from __future__ import annotations

from tracea_jax.emit.gemm_sm90 import GemmSm90Config


def raster(tile: int, m_tiles: int, n_tiles: int, band: int) -> tuple[int, int, int]:
    """(m, n, batch) of the tile of this number; see kernels/cuda/tile/scheduler.cuh."""
    batch, local = divmod(tile, m_tiles * n_tiles)
    first, in_band = divmod(local, band * n_tiles)
    height = min(band, m_tiles - first * band)
    n, m = divmod(in_band, height)
    return first * band + m, n, batch


def deal(tiles: int, blocks: int, config: GemmSm90Config) -> list[list[int]]:
    """Tiles of each block in turn, the same for all that share one; see ``raster``."""
    together = config.sharers
    round_tiles = blocks // together
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    for first in range(0, tiles, round_tiles):
        is_shared = config.cluster_k > 1 and tiles - first < round_tiles
        group = config.cluster_k if is_shared else together
        for block, mine in enumerate(dealt):
            if first + block // group < tiles:
                mine.append(first + block // group)
    return dealt
