// Rows of a norm over channels: a few lanes of a warp have a row, in packs of 16 bytes.
//
//   row 0   lane 0   lane 1 .. lane kLanes - 1 | lane 0   lane 1 ..       kPacks times
//   row 1   ...
//
// A block walks down the rows; all that a thread needs of its channels stays in registers.
// Assumes channels in multiples of a pack.
#pragma once

#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

// Traits: Element; kLanes, a power of two up to 32; kPacks; kThreads.
template <class Traits>
class NormRow {
 public:
  using Element = typename Traits::Element;
  static constexpr int kPack = Pack<Element>::kSize;
  static constexpr int kPacks = Traits::kPacks;
  static constexpr int kRows = Traits::kThreads / Traits::kLanes;  // of a block, at a time
  using Words = tracea::Words[kPacks];

  TRACEA_DEVICE explicit NormRow(int channels)
      : channels_(channels), lane_(static_cast<int>(threadIdx.x) % Traits::kLanes) {}

  TRACEA_DEVICE int lane() const { return lane_; }
  TRACEA_DEVICE int channel(int pack) const {
    return (pack * Traits::kLanes + lane_) * kPack;
  }
  TRACEA_DEVICE bool has(int pack) const { return channel(pack) < channels_; }

  // f(row) for the rows of this thread; those of a warp are all within or all beyond.
  template <class F>
  TRACEA_DEVICE void for_each(int rows, F f) const {
    const int own = static_cast<int>(threadIdx.x) / Traits::kLanes;
    for (i64 first = static_cast<i64>(blockIdx.x) * kRows; first < rows;
         first += static_cast<i64>(gridDim.x) * kRows) {
      f(first + own, first + own < rows);
    }
  }

  // Zeros where the row or the pack does not exist.
  TRACEA_DEVICE void load(const Element* array, i64 row, bool exists, Words& words) const {
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      words[k] = exists && has(k) ? *reinterpret_cast<const tracea::Words*>(
                                        array + row * channels_ + channel(k))
                                  : tracea::Words{};
    }
  }

  // The thread's channels of a vector of all.
  template <class Parameter>
  TRACEA_DEVICE void load(const void* vector, float (&values)[kPacks][kPack]) const {
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        values[k][j] =
            has(k) ? widen(static_cast<const Parameter*>(vector)[channel(k) + j]) : 0.0f;
      }
    }
  }

  // The sum over the lanes of a row, in all of them.
  TRACEA_DEVICE static float sum(float v) {
    TRACEA_UNROLL
    for (int bit = Traits::kLanes / 2; bit > 0; bit /= 2) {
      v += __shfl_xor_sync(0xFFFFFFFFu, v, bit);
    }
    return v;
  }

 private:
  int channels_, lane_;
};

}  // namespace tracea
