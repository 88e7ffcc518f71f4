// attention_combine: the parts of a softmax over keys, put together.
//
// For each row of the result there are parts: sums o_i of values with weights 2^(c s - m_i),
// the maximum m_i, and the weights' total l_i.
//
//     M = max m_i    w_i = 2^(m_i - M)    o = sum w_i o_i / sum w_i l_i
//
// A block computes a row: each of its warps adds up every so many parts, so that all loads
// are in flight together, and the warps' sums are added in their order. A part without keys
// has m_i = kNoKey, and its sums are not read; nor are those that weigh nothing: they may
// hold what a masked value was, which may be NaN.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/online_softmax.cuh"

namespace tracea {

struct AttentionCombineParams {
  const float* sums;    // (rows, splits, head_dim)
  const float* totals;  // (rows, splits, 2)
  void* o;              // (rows, head_dim), a row for (example, query, head)
  float* lse;           // (batch, heads, q_len); null unless it is saved
  int splits, heads, q_len;
  float scale_log2;
};

template <class Traits>
struct AttentionCombine {
  static constexpr int kThreads = Traits::kThreads, kWarps = kThreads / kWarpSize;
  static constexpr int kQuads = Traits::kHeadDim / 4;  // columns of a row, four at a time
  static constexpr int kGroups = ceil_div(kQuads, kWarpSize);  // of them, of a lane
  static constexpr int kInFlight = 4;                          // parts of a warp

  struct Shared {
    float most[kWarps], total[kWarps];
    float weights[kThreads];
    float4 sums[kWarps][kGroups * kWarpSize];
  };

  const AttentionCombineParams& p;
  Shared& smem;

  // The maximum over the block, of what its threads have.
  TRACEA_DEVICE float block_max(float v) const {
    TRACEA_UNROLL
    for (int i = kWarpSize / 2; i > 0; i /= 2) {
      v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, i));
    }
    if (threadIdx.x % kWarpSize == 0) smem.most[threadIdx.x / kWarpSize] = v;
    __syncthreads();
    v = smem.most[0];
    TRACEA_UNROLL
    for (int i = 1; i < kWarps; ++i) v = fmaxf(v, smem.most[i]);
    return v;
  }

  // Leaves the sum of each warp in shared memory.
  TRACEA_DEVICE void leave_sum(float v) const {
    TRACEA_UNROLL
    for (int i = kWarpSize / 2; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, i);
    if (threadIdx.x % kWarpSize == 0) smem.total[threadIdx.x / kWarpSize] = v;
  }

  // A warp's share of the sums: of parts `first`, first + kWarps, ...
  TRACEA_DEVICE void add_parts(const float4* sums, int first, int lane) const {
    float4 o[kGroups];
    TRACEA_UNROLL
    for (int g = 0; g < kGroups; ++g) o[g] = {0.0f, 0.0f, 0.0f, 0.0f};
    TRACEA_NO_UNROLL
    for (int i = first; i < p.splits; i += kWarps * kInFlight) {
      float4 part[kInFlight][kGroups];
      float w[kInFlight];
      TRACEA_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        const int at = i + j * kWarps;
        w[j] = at < p.splits ? smem.weights[at] : 0.0f;
        TRACEA_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          const int quad = g * kWarpSize + lane;
          part[j][g] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (w[j] != 0.0f && quad < kQuads) part[j][g] = sums[at * kQuads + quad];
        }
      }
      TRACEA_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        TRACEA_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          o[g].x = fmaf(w[j], part[j][g].x, o[g].x);
          o[g].y = fmaf(w[j], part[j][g].y, o[g].y);
          o[g].z = fmaf(w[j], part[j][g].z, o[g].z);
          o[g].w = fmaf(w[j], part[j][g].w, o[g].w);
        }
      }
    }
    TRACEA_UNROLL
    for (int g = 0; g < kGroups; ++g) smem.sums[first][g * kWarpSize + lane] = o[g];
  }

  TRACEA_DEVICE void operator()() const {
    using Element = typename Traits::Element;
    const int thread = static_cast<int>(threadIdx.x);
    const i64 row = blockIdx.x;
    const float2* totals = reinterpret_cast<const float2*>(p.totals) + row * p.splits;
    const float4* sums = reinterpret_cast<const float4*>(p.sums) + row * p.splits * kQuads;

    const float2 mine = thread < p.splits ? totals[thread] : float2{kNoKey, 0.0f};
    const float most = block_max(mine.x);
    const bool has_keys = mine.x != kNoKey;
    float weight = has_keys ? ex2_approx(mine.x - most) : 0.0f;
    if (mine.y != mine.y) weight = mine.y;  // NaN counts, whatever it is relative to
    smem.weights[thread] = weight;
    leave_sum(weight == 0.0f ? 0.0f : weight * mine.y);
    __syncthreads();
    add_parts(sums, thread / kWarpSize, thread % kWarpSize);
    __syncthreads();

    float total = smem.total[0];
    TRACEA_UNROLL
    for (int i = 1; i < kWarps; ++i) total += smem.total[i];
    const float factor = most == kNoKey ? 0.0f : 1.0f / total;  // of -inf for all keys 1 / 0
    Element* to = static_cast<Element*>(p.o) + row * Traits::kHeadDim;
    for (int quad = thread; quad < kQuads; quad += kThreads) {
      float4 o = smem.sums[0][quad];
      TRACEA_UNROLL
      for (int i = 1; i < kWarps; ++i) {
        const float4 more = smem.sums[i][quad];
        o = {o.x + more.x, o.y + more.y, o.z + more.z, o.w + more.w};
      }
      uint2 packed;
      packed.x = Packed<Element>::from({o.x * factor, o.y * factor}).bits;
      packed.y = Packed<Element>::from({o.z * factor, o.w * factor}).bits;
      *reinterpret_cast<uint2*>(to + 4 * quad) = packed;
    }
    if constexpr (Traits::kSavesLse) {
      const i64 head = row % p.heads, query = row / p.heads % p.q_len;
      const i64 example = row / p.heads / p.q_len;
      const bool has_seen = most != kMasked * p.scale_log2 && total != 0.0f;
      const float value = log_sum_exp(most, total, has_seen);
      if (thread == 0) p.lse[(example * p.heads + head) * p.q_len + query] = value;
    }
  }
};

template <class Traits>
TRACEA_DEVICE void attention_combine(const AttentionCombineParams& p) {
  using Kernel = AttentionCombine<Traits>;
  __shared__ typename Kernel::Shared smem;
  const Kernel kernel{p, smem};
  kernel();
}

}  // namespace tracea
