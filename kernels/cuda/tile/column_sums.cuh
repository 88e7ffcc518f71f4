// Sums of the columns of the 16 rows that a warp has of a sub-tile, see fragment.cuh.
//
// A lane has a pair of columns of two blocks, in two of the rows; eight lanes, those alike
// in bits 0 and 1, have the others. They halve what they sum in each exchange: a lane is left
// with one of the blocks (bit 4) and one column of the pair (bit 3).
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

// kDistance: columns from the first of the two blocks to the second.
template <int kDistance>
class WarpColumnSums {
 public:
  // `sums` are those of the rows, from the sub-tile's first column on. `rows` and `columns`
  // exist from there on, perhaps none.
  TRACEA_DEVICE WarpColumnSums(float* sums, int rows, int columns, int lane) {
    keeps_second_block_ = (lane & 16) != 0;
    keeps_second_column_ = (lane & 8) != 0;
    const int mine = 2 * (lane % 4) + (keeps_second_block_ ? kDistance : 0) +
                     (keeps_second_column_ ? 1 : 0);
    sums_ = sums + mine;
    columns_ = rows > 0 && (lane & 4) == 0 ? columns - mine : 0;  // one lane of two
    exists_[0] = lane / 4 < rows;
    exists_[1] = lane / 4 + 8 < rows;
  }

  // Writes the sums of two blocks, the first of which begins at `column`: what this lane has
  // of them is y[block][half].
  TRACEA_DEVICE void store(int column, const Pair (&y)[2][2]) const {
    const Pair first = of_rows(y[0]), second = of_rows(y[1]);
    const Pair pair = add(keeps_second_block_ ? second : first,
                          exchange(keeps_second_block_ ? first : second, 16));
    float sum = (keeps_second_column_ ? pair.y : pair.x) +
                exchange(keeps_second_column_ ? pair.x : pair.y, 8);
    sum += exchange(sum, 4);
    if (column < columns_) sums_[column] = sum;
  }

 private:
  // Rows past the edge are 0 times an operand that may be inf or NaN.
  TRACEA_DEVICE Pair of_rows(const Pair (&y)[2]) const {
    constexpr Pair kZero{0.0f, 0.0f};
    return add(exists_[0] ? y[0] : kZero, exists_[1] ? y[1] : kZero);
  }
  TRACEA_DEVICE static Pair add(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  TRACEA_DEVICE static float exchange(float v, int partner) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, partner);
  }
  TRACEA_DEVICE static Pair exchange(Pair v, int partner) {
    return {exchange(v.x, partner), exchange(v.y, partner)};
  }

  float* sums_;
  int columns_;
  bool keeps_second_block_, keeps_second_column_, exists_[2];
};

}  // namespace tracea
