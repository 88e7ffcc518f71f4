// attention_combine: the parts of a softmax over keys, put together.
//
// For each row of the result there are parts: sums o_i of weighted values, the
// maximum m_i of the scores that the weights are relative to, and the weights' total l_i.
//
//     M = max m_i    w_i = 2^(c (m_i - M))    o = sum w_i o_i / sum w_i l_i
//
// A warp computes a row, adding in the order of the parts. A part without keys has m_i =
// kNoKey, and its sums are not read; nor are those that weigh nothing: they may hold what a
// masked value was, which may be NaN.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/online_softmax.cuh"

namespace tracea {

struct AttentionCombineParams {
  const float* sums;    // (rows, splits, head_dim)
  const float* totals;  // (rows, splits, 2)
  void* o;              // (rows, head_dim), a row for (example, query, head)
  float* lse;           // (batch, heads, q_len); null unless it is saved
  int rows, splits, heads, q_len;
  float scale_log2;
};

template <class Traits>
TRACEA_DEVICE void attention_combine(const AttentionCombineParams& p) {
  using Element = typename Traits::Element;
  constexpr int kWarps = Traits::kThreads / kWarpSize;
  constexpr int kGroups = ceil_div(Traits::kHeadDim / 4, kWarpSize);  // of a lane, of 4
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = static_cast<int>(blockIdx.x) * kWarps +
                  warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (row >= p.rows) return;
  const float2* totals =
      reinterpret_cast<const float2*>(p.totals) + static_cast<i64>(row) * p.splits;
  const float4* sums = reinterpret_cast<const float4*>(p.sums) +
                       static_cast<i64>(row) * p.splits * (Traits::kHeadDim / 4);

  float most = kNoKey;
  for (int i = lane; i < p.splits; i += kWarpSize) most = fmaxf(most, totals[i].x);
  TRACEA_UNROLL
  for (int i = 16; i > 0; i /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, i));
  }

  float total = 0.0f;
  float4 o[kGroups];
  TRACEA_UNROLL
  for (int g = 0; g < kGroups; ++g) o[g] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < p.splits; first += kWarpSize) {
    const bool is_part = first + lane < p.splits;
    const float2 mine = is_part ? totals[first + lane] : float2{kNoKey, 0.0f};
    const bool has_keys = mine.x != kNoKey;
    float weight = has_keys ? ex2_approx((mine.x - most) * p.scale_log2) : 0.0f;
    if (mine.y != mine.y) weight = mine.y;  // NaN counts, whatever it is relative to
    const int count = min(kWarpSize, p.splits - first);
    TRACEA_NO_UNROLL
    for (int i = 0; i < count; i += 4) {
      // Four parts are in flight together.
      float4 part[4][kGroups];
      float w[4];
      TRACEA_UNROLL
      for (int j = 0; j < 4; ++j) {
        w[j] = __shfl_sync(0xFFFFFFFFu, weight, (i + j) % kWarpSize);
        TRACEA_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          const int column = g * kWarpSize + lane;
          part[j][g] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (i + j < count && w[j] != 0.0f && column < Traits::kHeadDim / 4) {
            part[j][g] = sums[(first + i + j) * (Traits::kHeadDim / 4) + column];
          }
        }
      }
      TRACEA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float of_part = __shfl_sync(0xFFFFFFFFu, mine.y, (i + j) % kWarpSize);
        if (i + j < count && w[j] != 0.0f) total = fmaf(w[j], of_part, total);
        TRACEA_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          o[g].x = fmaf(w[j], part[j][g].x, o[g].x);
          o[g].y = fmaf(w[j], part[j][g].y, o[g].y);
          o[g].z = fmaf(w[j], part[j][g].z, o[g].z);
          o[g].w = fmaf(w[j], part[j][g].w, o[g].w);
        }
      }
    }
  }

  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  Element* to = static_cast<Element*>(p.o) + static_cast<i64>(row) * Traits::kHeadDim;
  TRACEA_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int column = 4 * (g * kWarpSize + lane);
    if (column < Traits::kHeadDim) {
      uint2 packed;
      packed.x = Packed<Element>::from({o[g].x * factor, o[g].y * factor}).bits;
      packed.y = Packed<Element>::from({o[g].z * factor, o[g].w * factor}).bits;
      *reinterpret_cast<uint2*>(to + column) = packed;
    }
  }
  if constexpr (Traits::kSavesLse) {
    const int head = row % p.heads, query = row / p.heads % p.q_len;
    const i64 example = row / p.heads / p.q_len;
    const float value = log_sum_exp(most, total, p.scale_log2);
    if (lane == 0) p.lse[(example * p.heads + head) * p.q_len + query] = value;
  }
}

}  // namespace tracea
