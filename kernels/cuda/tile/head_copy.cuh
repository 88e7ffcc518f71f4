// A block's asynchronous copies of rows of one head to shared memory.
//
// In memory a row of an example is all its heads, one after another; `pitch` bytes lie from
// a row to the next. In shared memory a tile is slabs of 64 columns, 128 swizzled bytes a
// row. Rows behind the last and columns behind the head's become zeros: weights of zero do
// not meet what is no number. All threads copy together in units of 16 bytes, so heads have
// multiples of 8 columns.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/common.cuh"
#include "tile/operand_map.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <int kRows_, int kColumns_, int kThreads>
struct HeadCopy {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kSlabs = ceil_div(kColumns, 64);
  using Map = CopyMap<Swizzle128B, kRows, 128, 16, kThreads>;
  static constexpr u32 kSlabBytes = kRows * 128, kBytes = kSlabs * kSlabBytes;
  static_assert(kColumns % 8 == 0, "units are whole");

  // Starts the copies of the rows from `row` on, of `rows` that there are, to `to`.
  // `head`: the head's first column in row 0.
  TRACEA_DEVICE static void start(u32 to, const u8* head, i64 pitch, int row, int rows) {
    const int thread = static_cast<int>(threadIdx.x);
    const int byte = Map::first_byte(thread), left = rows - row - Map::first_row(thread);
    const u8* at = head + (row + Map::first_row(thread)) * pitch + byte;
    TRACEA_UNROLL
    for (int i = 0; i < Map::kUnits; ++i) {
      if (i > 0) at += (Map::rows_to(i) - Map::rows_to(i - 1)) * pitch;
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        const bool is_column = (slab + 1) * 64 <= kColumns || slab * 64 + byte / 2 < kColumns;
        cp_async_or_zero<16>(to + slab * kSlabBytes + Map::byte(thread, i), at + slab * 128,
                             is_column && Map::rows_to(i) < left);
      }
    }
  }
};

}  // namespace tracea
