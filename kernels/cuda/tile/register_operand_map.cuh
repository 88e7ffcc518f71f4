// Which words of an m-major TF32 tile are whose registers; see register_operand.cuh.
#pragma once

#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Swizzle, bool kPaired>
struct RegisterOperandMap {
  static constexpr int kWords = kPaired ? 2 : 1;  // of one load
  static constexpr int kColumns = 32;             // of a slab in memory, and its rows
  static constexpr u32 kSlabBytes = kColumns * 128;
  static constexpr u32 kStepBytes = 8 * 128;
  static_assert(kStepBytes % Swizzle::kPeriodBytes == 0, "all steps look alike");

  // Where register `i` of `thread` lies in the first step of the first 64 columns.
  TRACEA_HOST_DEVICE static constexpr u32 start(int thread, int i) {
    const int row = wgmma_tf32_a_row(thread, i), k = wgmma_tf32_a_col(thread, i);
    const int column = kPaired ? paired_column(row) : row;
    return column / kColumns * kSlabBytes +
           Swizzle::apply(128 * k + 4 * (column % kColumns));
  }

  TRACEA_HOST_DEVICE static constexpr u32 first_byte(int thread) { return start(thread, 0); }

  // Where register i lies in step `step` of the 64 columns from 64 slab, given the byte of
  // the first one: k + 4 and the next 8 columns are one bit each of the address before the
  // swizzle.
  TRACEA_HOST_DEVICE static constexpr u32 byte(u32 first, int slab, int step, int i) {
    const u32 distance = (i / 2) * 4 * 128 + (i % 2) * (kPaired ? 4 : 32);
    return Swizzle::move(first, distance) + slab * 2 * kSlabBytes + step * kStepBytes;
  }
};

}  // namespace tracea
