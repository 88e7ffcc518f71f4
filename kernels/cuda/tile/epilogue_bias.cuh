// The bias of a warpgroup's part of a tile: fetched ahead of the mainloop, a column or two by
// each thread, then shared and added to the accumulators.
//
// Zeros are added where there is no bias but a residual in registers or a second result.
// They come from shared memory after a barrier, which keeps the compiler from starting on
// all sub-tiles at once and running out of registers.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/epilogue_tiles.cuh"

namespace tracea {

template <class Traits>
class EpilogueBias {
 public:
  using Element = typename Traits::ElementBias;
  using Tiles = EpilogueTiles<Traits>;
  using Tile = typename Tiles::Tile;
  using Place = typename Tiles::Place;
  // Columns of the result in this warpgroup's part of a tile.
  static constexpr int kColumns = Tiles::kTransposed ? 64 * Traits::kSlabs : Traits::kTileN;
  static constexpr int kPerThread = ceil_div(kColumns, kWarpgroupSize);

  // `smem` is the warpgroup's own, of kColumns floats.
  TRACEA_DEVICE EpilogueBias(const EpilogueParams<Traits>& params, u32 smem, int warpgroup,
                             int thread)
      : params_(params), smem_(smem), warpgroup_(warpgroup), thread_(thread) {}

  // Fetches what the tile at (m, n) needs.
  TRACEA_DEVICE void prefetch(int m, int n, int batch) {
    const int first_column = Tiles::kTransposed ? m : n;
    const u64 first = Traits::kBiasIsBatched ? static_cast<u64>(batch) * params_.n : 0;
    const Element* bias = static_cast<const Element*>(params_.bias) + first;
    TRACEA_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      const bool inside =
          Traits::kHasBias && column < kColumns && first_column + column < params_.n;
      fetched_[i] = inside ? widen(bias[first_column + column]) : 0.0f;
    }
  }

  TRACEA_DEVICE void share() {
    TRACEA_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      if (column < kColumns) st_shared(smem_ + 4 * column, fetched_[i]);
    }
    warpgroup_barrier(warpgroup_);
  }

  // z of sub-tile `index`, in place: it is both a result and the argument of the activation.
  // `is_gathered` says that its sums are new: its neighbour has not added the bias to those
  // they share.
  TRACEA_DEVICE void add(float (&accumulators)[Tiles::kAccumulators], int index,
                         bool is_gathered) const {
    const int sub = Tiles::sub_tile_of(index), column = Tiles::corner(0, 0, index).column;
    Pair bias;
    TRACEA_UNROLL
    for (int block = 0; block < Tile::kBlocks; ++block) {
      // The blocks of a transposed product are rows of the same columns.
      if (!Tiles::kTransposed || block == 0) {
        bias = ld_shared_pair(smem_ + 4 * (column + Place::col(thread_, block)));
      }
      const int first = Tiles::first_column(sub) + 8 * block;
      if (first < sub * Tile::kColumns && !is_gathered) continue;
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = Place::first_register(first / 8, half);
        accumulators[i] += bias.x;
        accumulators[i + Place::kNext] += bias.y;
      }
    }
  }

 private:
  const EpilogueParams<Traits>& params_;
  const u32 smem_;
  const int warpgroup_, thread_;
  float fetched_[kPerThread];
};

}  // namespace tracea
