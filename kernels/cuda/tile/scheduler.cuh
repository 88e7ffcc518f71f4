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
// tracea_jax/emit/gemm_sm90.py is the same order in Python.
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

}  // namespace tracea
