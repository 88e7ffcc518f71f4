// sum_of_parts: out[i] = sum over parts of in[part, i], rounded once; in f32, in an order that
// is always the same.
//
// A block has 32 * kVector neighbouring sums. Each of its warps adds every kWarps-th part, all
// of them at once in flight as far as registers go; the warps' sums are added in shared memory.
//
// Assumes that kVector divides the number of sums.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"

namespace tracea {

template <class Element, int kVector, int kWarps>
TRACEA_DEVICE void sum_of_parts(const float* in, Element* out, int parts, i64 count) {
  static_assert(kVector == 2 || kVector == 4, "a load of 8 or 16 bytes");
  __shared__ float sums[kWarps][kVector][kWarpSize];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const i64 first = (static_cast<i64>(blockIdx.x) * kWarpSize + lane) * kVector;
  float sum[kVector] = {};
  if (first < count) {
#pragma unroll 4
    for (int part = warp; part < parts; part += kWarps) {
      const float* from = in + part * count + first;
      if constexpr (kVector == 4) {
        const float4 v = *reinterpret_cast<const float4*>(from);
        const float more[4] = {v.x, v.y, v.z, v.w};
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) sum[i] += more[i];
      } else {
        const float2 v = *reinterpret_cast<const float2*>(from);
        sum[0] += v.x;
        sum[1] += v.y;
      }
    }
  }
  TRACEA_UNROLL
  for (int i = 0; i < kVector; ++i) sums[warp][i][lane] = sum[i];
  __syncthreads();
  if (warp > 0 || first >= count) return;
  TRACEA_UNROLL
  for (int other = 1; other < kWarps; ++other) {
    TRACEA_UNROLL
    for (int i = 0; i < kVector; ++i) sum[i] += sums[other][i][lane];
  }
  TRACEA_UNROLL
  for (int i = 0; i < kVector; i += 2) {
    store_pair<true>(out + first + i, 2, Pair{sum[i], sum[i + 1]});
  }
}

}  // namespace tracea
