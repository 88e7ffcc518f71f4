// Order of the tiles of a batched output, so that neighbours in time share operands in L2.
//
// Tiles are numbered batch by batch. Inside a batch, bands of `kBand` rows of tiles are
// walked column by column:
//
//            n ->
//        m   0  3  6  9         kBand = 3, 5 x 4 tiles
//        |   1  4  7 10
//        v   2  5  8 11
//           12 14 16 18         the last band is as high as what is left
//           13 15 17 19
//
// A persistent grid takes them round by round. If clusters may share tiles, those that are
// left for the last round, fewer than blocks, are computed by a whole cluster each:
//
//   block   0    1    2    3    4    5    6    7        10 tiles, clusters of kClusterK = 4
//           0    1    2    3    4    5    6    7        the first round
//          (8    8    8    8)  (9    9    9    9)       the last, a part of k each
//
// tracea_jax/emit/gemm_sm90.py is the same in Python.
#pragma once

#include "tile/common.cuh"

namespace tracea {

struct TileCoordinate {
  int m, n, batch;
};

template <int kBand>
struct BandedRaster {
  static_assert(kBand >= 1, "a band has at least one row of tiles");

  int m_tiles, n_tiles;

  TRACEA_HOST_DEVICE constexpr TileCoordinate at(u32 tile) const {
    const u32 columns = static_cast<u32>(n_tiles);
    const u32 rows = static_cast<u32>(m_tiles);
    const u32 batch = tile / (rows * columns);
    const u32 local = tile - batch * (rows * columns);
    const u32 band = local / (kBand * columns);
    const u32 in_band = local - band * (kBand * columns);
    const u32 left = rows - band * kBand;
    const u32 height = left < kBand ? left : kBand;
    const u32 n = in_band / height;
    const u32 m = band * kBand + in_band - n * height;
    return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(batch)};
  }
};

// Which tile a block computes in which round. Blocks in groups of kSharers share operands,
// and a tile is that of a group; in groups of kClusterK they may share a tile.
template <int kSharers, int kClusterK>
struct TileDeal {
  static_assert(kSharers == 1 || kClusterK == 1, "a cluster shares operands or tiles");

  u32 tiles, blocks;

  // Tiles of a whole round.
  TRACEA_HOST_DEVICE constexpr u32 round() const { return blocks / kSharers; }

  // Whether clusters share the tiles of the round that begins with tile `first`.
  TRACEA_HOST_DEVICE constexpr bool is_shared(u32 first) const {
    return kClusterK > 1 && tiles - first < round();
  }

  // The tile of a block in that round; none if it is not below `tiles`.
  TRACEA_HOST_DEVICE constexpr u32 tile(u32 first, u32 block) const {
    return first + block / static_cast<u32>(is_shared(first) ? kClusterK : kSharers);
  }

  // Whether the block is left with a tile to share, its last one.
  TRACEA_HOST_DEVICE constexpr bool shares_tile(u32 block) const {
    return kClusterK > 1 && block / static_cast<u32>(kClusterK) < tiles % round();
  }
};

}  // namespace tracea
