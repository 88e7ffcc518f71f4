// How a warpgroup's accumulators become boxes of the result: what an epilogue is given, and
// which sub-tiles a slab leaves in.
//
// A 64 x N slab leaves in sub-tiles of 64 rows x 128 bytes, the widest box of a swizzled
// tensor map. If they do not divide the tile, the last one overlaps its neighbour, and both
// store the same there.
//
// The accumulated product may be the transposed result. Then its rows are paired columns of
// the result (see fragment.cuh), and a sub-tile of 64 rows is as many columns of 128 bytes:
// one box of 16-bit elements, two of f32. m, n and tile count the accumulated product here,
// EpilogueParams and Corner the result.
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/sub_tile.cuh"

namespace tracea {

// How a matrix is reached: through its tensor map, or by its address.
template <bool kMapped, class Address>
struct MatrixPointer {
  using Type = const TensorMap*;
};
template <class Address>
struct MatrixPointer<false, Address> {
  using Type = Address;
};

template <class Traits>
struct EpilogueParams {
  using Result = typename MatrixPointer<Traits::kMapsResults, void*>::Type;
  using Residual = typename MatrixPointer<Traits::kMapsResidual, const void*>::Type;
  Result out;
  Result preactivation;  // z, or g; null unless it is saved
  Result factor;         // u, null unless it is saved
  const void* bias;      // (n) or (batch, n), or null
  Residual residual;     // (batch, m, n), or null
  int m, n;
  // (batch, 4 ceil(m / r), n), r = 64 kSummedSlabs: the four warps' of each r rows; or null.
  float* column_sums;
};

// Where a sub-tile begins in the result.
struct Corner {
  int row, column;
};

template <class Traits>
struct EpilogueTiles {
  using Element = typename Traits::ElementOut;
  using Tile = SubTile<Element>;
  using Place = PairPlace<Traits::kTransposed>;

  static constexpr int kColumns = Traits::kGated ? Traits::kTileN / 2 : Traits::kTileN;
  static constexpr int kAccumulators = Traits::kTileN / 2;  // of a slab
  static constexpr int kFactor = kColumns / 2;  // register of u's first column
  static constexpr bool kTransposed = Traits::kTransposed;
  static constexpr int kBoxes = kTransposed ? Tile::kTransposedBoxes : 1;  // of a sub-tile
  static constexpr int kSubTiles = ceil_div(kColumns, Tile::kColumns);     // of a slab
  static constexpr int kCount = Traits::kSlabs * kSubTiles;
  static_assert(kColumns >= Tile::kColumns, "a sub-tile must fit into the tile");
  static_assert(!Traits::kGated || kColumns % Tile::kColumns == 0,
                "sub-tiles of a gated product do not overlap");
  static_assert(!(Traits::kGated && kTransposed), "gated products are not transposed");

  // Sub-tiles are counted along n first; or, where slabs are summed together, down the slabs
  // first, so that only the sums of one sub-tile's columns wait in registers.
  static constexpr bool kGoesDown = Traits::kSumsColumns && Traits::kSummedSlabs > 1;
  static constexpr int slab_of(int index) {
    return kGoesDown ? index % Traits::kSlabs : index / kSubTiles;
  }
  // Its number in the slab.
  static constexpr int sub_tile_of(int index) {
    return kGoesDown ? index / Traits::kSlabs : index % kSubTiles;
  }

  // The first column of a sub-tile of a slab.
  static constexpr int first_column(int sub) {
    constexpr int kLast = kColumns - Tile::kColumns;
    return sub * Tile::kColumns < kLast ? sub * Tile::kColumns : kLast;
  }

  // Whether a sub-tile is written together with the next one: if that is staged right after
  // it, on its right.
  static constexpr bool kWritesPairs = !Traits::kMapsResults && !kTransposed && !kGoesDown &&
                                       Traits::kClusterK == 1 &&
                                       !Traits::kSavesPreactivation;
  static constexpr bool is_left(int sub) {
    return kWritesPairs && sub % 2 == 0 && sub + 1 < kSubTiles &&
           first_column(sub + 1) == first_column(sub) + Tile::kColumns;
  }
  static constexpr bool is_right(int sub) { return sub % 2 == 1 && is_left(sub - 1); }

  // Where sub-tile `index` of the rows from m on, columns from n on, begins.
  TRACEA_DEVICE static Corner corner(int m, int n, int index) {
    const int row = m + slab_of(index) * Tile::kRows;
    const int column = n + first_column(sub_tile_of(index));
    return kTransposed ? Corner{column, row} : Corner{row, column};
  }
};

}  // namespace tracea
