// The sums of the columns of a derivative before it is rounded: each warp those of its own
// rows, over kSummedSlabs slabs, in plain stores. See column_sums.cuh for those of a warp.
#pragma once

#include "ptx/convert.cuh"
#include "tile/column_sums.cuh"
#include "tile/common.cuh"
#include "tile/epilogue_tiles.cuh"

namespace tracea {

template <class Traits>
class EpilogueSums {
 public:
  using Tiles = EpilogueTiles<Traits>;
  using Tile = typename Tiles::Tile;
  using Place = typename Tiles::Place;
  using OfWarp = WarpColumnSums<8 * (Tile::block(0, 1) - Tile::block(0, 0))>;
  static constexpr int kSlabs = Traits::kSummedSlabs;  // that a warp sums together
  static_assert(!Traits::kSumsColumns || (Traits::kDifferentiates && !Tiles::kTransposed),
                "columns are summed of derivatives, where lanes hold whole columns");
  static_assert(kSlabs == 1 || (Traits::kSlabs % kSlabs == 0 && Traits::kClusterK == 1),
                "slabs are summed together if the consumer has all of them");

  TRACEA_DEVICE EpilogueSums(const EpilogueParams<Traits>& params, int thread)
      : params_(params), thread_(thread) {}

  // Which of the slabs that are summed together sub-tile `index` lies in.
  static constexpr int slab_of(int index) { return Tiles::slab_of(index) % kSlabs; }

  // Rows past the edge are 0 times an operand that may be inf or NaN; there the derivative is
  // finite, at a residual of 0.
  TRACEA_DEVICE void clear_past_edge(float (&accumulators)[Tiles::kAccumulators], int sub,
                                     const Corner& at) const {
    if (at.row + Tile::kRows <= params_.m) return;  // rare, and alike in all threads
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (at.row + Place::row(thread_, 0, half) < params_.m) continue;
      TRACEA_UNROLL
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const int i = Place::first_register(Tiles::first_column(sub) / 8 + block, half);
        accumulators[i] = accumulators[i + Place::kNext] = 0.0f;
      }
    }
  }

  // Where this warp leaves the sums that end in this slab, from the corner's column on.
  TRACEA_DEVICE OfWarp of_warp(const Corner& at, int slab, int batch) const {
    constexpr int kRows = kSlabs * Tile::kRows, kWarps = kWarpgroupSize / kWarpSize;
    const int first = at.row - slab * Tile::kRows, warp = thread_ / kWarpSize;
    const u64 group = static_cast<u64>(batch) * ceil_div(params_.m, kRows) + first / kRows;
    return OfWarp(params_.column_sums + (group * kWarps + warp) * params_.n + at.column,
                  first < params_.m ? params_.n - at.column : 0, thread_ % kWarpSize);
  }

  // Adds this thread's rows of a chunk to those of the slabs before, and after the last of
  // them the warp's rows to each other.
  TRACEA_DEVICE void add_chunk(const Pair (&y)[2][2], int slab, int chunk,
                               const OfWarp& sums) {
    Pair total[2];
    TRACEA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Pair& before = summed_[Tile::block(chunk, i)];
      total[i] = add(y[i][0], y[i][1]);
      if (slab > 0) total[i] = add(before, total[i]);
      before = total[i];
    }
    const int column = 8 * Tile::block(chunk, 0);
    if (slab == kSlabs - 1) sums.store(column, total[0], total[1]);
  }

 private:
  const EpilogueParams<Traits>& params_;
  const int thread_;
  Pair summed_[Tile::kBlocks];  // this thread's columns of a sub-tile, of the slabs before
};

}  // namespace tracea
