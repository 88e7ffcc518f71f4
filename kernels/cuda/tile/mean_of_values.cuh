// Sums of all values of a head, for queries that have seen no key: softmax of equal scores
// is their mean.
//
// A warp adds up whole columns, each lane its columns of every eighth key, and the rows that
// ask for them take them in the fragment of tile/fragment.cuh.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/score_bias.cuh"

namespace tracea {

// `values`: the first key's, from the head's first column on; `pitch`: elements from a key to
// the next. wants[half]: whether the lane's row of that half takes the sums.
template <class Element, int kCount>
TRACEA_DEVICE void take_sum_of_values(float (&o)[kCount], const bool (&wants)[2],
                                      const Element* values, i64 pitch, int keys, int lane) {
  constexpr int kBlocks = kCount / 4, kTogether = 4;  // of 8 columns
  TRACEA_UNROLL
  for (int block = 0; block < kBlocks; block += kTogether) {
    float sum[2 * kTogether] = {};
    TRACEA_NO_UNROLL
    for (int key = lane / 4; key < keys; key += 8) {
      TRACEA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (block + i >= kBlocks) break;
        const Element* at = values + key * pitch + 8 * (block + i) + 2 * (lane % 4);
        const Pair v =
            Packed<Element>{load_constant(reinterpret_cast<const u32*>(at))}.widen();
        sum[2 * i] += v.x;
        sum[2 * i + 1] += v.y;
      }
    }
    TRACEA_UNROLL
    for (int i = 0; i < 2 * kTogether; ++i) {
      if (block + i / 2 >= kBlocks) break;
      TRACEA_UNROLL
      for (int far = 4; far < kWarpSize; far *= 2) {
        sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], far);
      }
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& found = o[4 * (block + i / 2) + 2 * half + i % 2];
        found = wants[half] ? sum[i] : found;
      }
    }
  }
}

}  // namespace tracea
