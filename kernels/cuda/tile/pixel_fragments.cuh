// What happens to a warp's mma.sync accumulators, rows being pixels and columns channels:
// see tile/pixel_epilogue.cuh. The four lanes of a row store 16 or 32 bytes.
#pragma once

#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/pixel_epilogue.cuh"

namespace tracea {

struct PixelFragmentParams {
  void* out;
  void* preactivation;   // null unless it is saved
  const void* bias;      // (channels), or null
  const void* residual;  // of the result's shape, or null
  int channels, group;   // of the result, and of one of its groups
  int rows, columns;     // of an image of the result
};

// kRowBlocks fragments of 16 pixels by kColumnBlocks of 8 channels of one warp.
template <class Traits, int kRowBlocks, int kColumnBlocks>
class PixelFragments {
 public:
  // `channel` is the warp's first, of `channels` that are left of its group.
  TRACEA_DEVICE PixelFragments(const PixelFragmentParams& params, int channel, int channels)
      : p_(params),
        channel_(channel + mma_c_col(lane(), 0)),
        left_(channels - mma_c_col(lane(), 0)) {}

  // `first` is the warp's first pixel, of `count`; place(index) is its number in memory.
  template <class Place>
  TRACEA_DEVICE void store(const float (&sums)[kRowBlocks][kColumnBlocks][4], int first,
                           int count, Place&& place) {
    TRACEA_UNROLL
    for (int j = 0; j < kColumnBlocks; ++j) {
      bias_[j] = load_bias<Traits>(p_, channel_ + 8 * j);
    }
    TRACEA_UNROLL
    for (int block = 0; block < kRowBlocks; ++block) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int index = first + 16 * block + mma_c_row(lane(), 2 * half);
        if (index < count) store_row(sums[block], half, place(index));
      }
    }
  }

 private:
  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  TRACEA_DEVICE void store_row(const float (&sums)[kColumnBlocks][4], int half, i64 pixel) {
    const i64 at = pixel * p_.channels + channel_;
    Pair residual[kColumnBlocks];  // all are on their way before the first is needed
    TRACEA_UNROLL
    for (int j = 0; j < kColumnBlocks; ++j) {
      residual[j] = load_residual<Traits>(p_, at + 8 * j, left_ - 8 * j);
    }
    TRACEA_UNROLL
    for (int j = 0; j < kColumnBlocks; ++j) {
      const Pair sum{sums[j][2 * half], sums[j][2 * half + 1]};
      store_pixel<Traits>(p_, at + 8 * j, left_ - 8 * j, sum, bias_[j], residual[j]);
    }
  }

  const PixelFragmentParams& p_;
  const int channel_, left_;
  Pair bias_[kColumnBlocks];
};

}  // namespace tracea
