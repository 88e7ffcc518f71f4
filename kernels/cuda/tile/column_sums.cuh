// Sums of columns over the lanes of a warp, which has 16 rows of a slab, see fragment.cuh.
//
// A lane has a pair of columns of two blocks, and sums of its own rows; eight lanes, those
// alike in bits 0 and 1, have the others. They halve what they sum in each exchange: a lane
// is left with one of the blocks (bit 4) and one column of the pair (bit 3).
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE Pair add(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }

// kDistance: columns from the first of the two blocks to the second.
template <int kDistance>
class WarpColumnSums {
 public:
  // `sums` are the warp's, from the sub-tile's first column on; `columns` of them exist,
  // perhaps none.
  TRACEA_DEVICE WarpColumnSums(float* sums, int columns, int lane) {
    keeps_second_block_ = (lane & 16) != 0;
    keeps_second_column_ = (lane & 8) != 0;
    const int mine = 2 * (lane % 4) + (keeps_second_block_ ? kDistance : 0) +
                     (keeps_second_column_ ? 1 : 0);
    sums_ = sums + mine;
    columns_ = (lane & 4) == 0 ? columns - mine : 0;  // one lane of two
  }

  // Writes the sums of two blocks, the first of which begins at `column`, of the sums that
  // the lanes have.
  TRACEA_DEVICE void store(int column, Pair first, Pair second) const {
    const Pair pair = add(keeps_second_block_ ? second : first,
                          exchange(keeps_second_block_ ? first : second, 16));
    float sum = (keeps_second_column_ ? pair.y : pair.x) +
                exchange(keeps_second_column_ ? pair.x : pair.y, 8);
    sum += exchange(sum, 4);
    if (column < columns_) sums_[column] = sum;
  }

 private:
  TRACEA_DEVICE static float exchange(float v, int partner) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, partner);
  }
  TRACEA_DEVICE static Pair exchange(Pair v, int partner) {
    return {exchange(v.x, partner), exchange(v.y, partner)};
  }

  float* sums_;
  int columns_;
  bool keeps_second_block_, keeps_second_column_;
};

}  // namespace tracea
