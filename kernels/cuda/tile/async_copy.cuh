// A block's copies of one operand's tiles from global to swizzled shared memory.
//
// All threads copy a tile together in units of the largest size that every row of the
// matrix is aligned to (CopyMap); what lies outside of the matrix becomes zero. Rows of
// 16-bit elements that start at odd multiples of 2 bytes are loaded element by element into
// registers, and stored a step later.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/common.cuh"
#include "tile/operand_map.cuh"

namespace tracea {

// kAlignBytes: 16, 8, 4 or 2, divides the length of every row of the matrix. kRunsAlongK:
// rows run along k, else along m or n. kParts: in how many parts a tile is copied.
template <class Element, class Swizzle, int kRows, int kColumns, bool kRunsAlongK,
          int kAlignBytes, int kThreads, int kParts>
class TileCopy {
 public:
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr bool kByElement = kAlignBytes < 4;
  using Map = CopyMap<Swizzle, kRows, kColumns * kElementBytes,
                      kByElement ? 4 : kAlignBytes, kThreads>;
  static constexpr int kBytes = Map::kBytes, kRowBytes = Map::kRowBytes;
  static constexpr int kUnitsPerPart = ceil_div(Map::kUnits, kParts);
  static_assert(kElementBytes <= kAlignBytes, "units are whole elements");

  // Starts at the tile in row `row` and column `column` of a matrix of rows x columns.
  TRACEA_DEVICE TileCopy(const void* matrix, int rows, int columns, int row, int column)
      : thread_(static_cast<int>(threadIdx.x)),
        pitch_(static_cast<i64>(columns) * kElementBytes) {
    row += Map::first_row(thread_);
    column += Map::first_byte(thread_) / kElementBytes;
    rows_left_ = rows - row;
    columns_left_ = columns - column;
    source_ = static_cast<const u8*>(matrix) + row * pitch_ +
              static_cast<i64>(column) * kElementBytes;
    row_ = source_;
  }

  // Starts the copies of part `part`, 0 first, into the tile at `smem`.
  TRACEA_DEVICE void start(u32 smem, int part) {
    if (part == 0) row_ = source_;
    TRACEA_UNROLL
    for (int j = 0; j < kUnitsPerPart; ++j) {
      const int i = part * kUnitsPerPart + j;
      if (i >= Map::kUnits) break;
      // From row to row by addition: distances to all of them would fill the registers.
      if (i > 0) row_ += (Map::rows_to(i) - Map::rows_to(i - 1)) * pitch_;
      const u8* unit = row_ + Map::bytes_to(i);
      const bool row_inside = Map::rows_to(i) < rows_left_;
      const int left = columns_left_ - Map::bytes_to(i) / kElementBytes;
      if constexpr (kByElement) {
        staged_[j][0] = load_u16_or_zero(unit, row_inside && left > 0);
        staged_[j][1] = load_u16_or_zero(unit + 2, row_inside && left > 1);
      } else {
        cp_async_or_zero<Map::kUnitBytes>(smem + Map::byte(thread_, i), unit,
                                          row_inside && left > 0);
      }
    }
  }

  // Stores what `start` has loaded, if it did; part and place must be the same.
  TRACEA_DEVICE void finish(u32 smem, int part) const {
    if constexpr (kByElement) {
      TRACEA_UNROLL
      for (int j = 0; j < kUnitsPerPart; ++j) {
        const int i = part * kUnitsPerPart + j;
        if (i >= Map::kUnits) break;
        st_shared_pair(smem + Map::byte(thread_, i), staged_[j][0], staged_[j][1]);
      }
    }
  }

  // Goes on to the next tile along k.
  TRACEA_DEVICE void advance() {
    if constexpr (kRunsAlongK) {
      source_ += kRowBytes;
      columns_left_ -= kColumns;
    } else {
      source_ += kRows * pitch_;
      rows_left_ -= kRows;
    }
  }

 private:
  const int thread_;
  const i64 pitch_;  // bytes
  const u8* source_;
  const u8* row_;                 // of the unit to copy next
  int rows_left_, columns_left_;  // of the matrix, from the thread's first unit
  u16 staged_[kByElement ? kUnitsPerPart : 1][2];
};

}  // namespace tracea
