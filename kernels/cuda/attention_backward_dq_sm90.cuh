// attention_backward_dq_sm90: the gradient of the queries of attention from sums in memory.
//
//     dq = scale sums, rounded
//
// Sums lie as tile/attention_sums.cuh says: a warpgroup takes a part, whose registers lie as
// those that it was added from. A block that no tile of keys had its turn at is zero.
#pragma once

#include "ptx/mbarrier.cuh"
#include "tile/attention_operands.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionDqParams {
  const TensorMap* dq;  // boxes of 16 rows of 64 columns
  const float* sums;    // (batch, heads, blocks, parts, 64 x 64)
  const int* turns;     // (batch, heads, blocks), or null
  int parts;            // of a head
  int heads;
  float scale;
};

template <class Traits>
TRACEA_DEVICE void attention_backward_dq_sm90(const AttentionDqParams& p) {
  __shared__ __align__(1024) u8 staged[64 * 128];
  using Rows = HeadTile<64, 64>;
  const int thread = static_cast<int>(threadIdx.x);
  const int of_head = static_cast<int>(blockIdx.x) / p.parts;
  const int part = static_cast<int>(blockIdx.x) - of_head * p.parts;
  const bool is_seen = !Traits::kOrdered || p.turns[blockIdx.x / 2] > 0;
  const Words* const sums =
      reinterpret_cast<const Words*>(p.sums) + static_cast<i64>(blockIdx.x) * 1024 + thread;
  float c[32];
  TRACEA_UNROLL
  for (int i = 0; i < 8; ++i) {
    const Words quad = is_seen ? sums[i * kWarpgroupSize] : Words{};
    TRACEA_UNROLL
    for (int j = 0; j < 4; ++j) {
      c[4 * i + j] = __int_as_float(static_cast<int>(quad.w[j])) * p.scale;
    }
  }
  const u32 to = shared_address(staged);
  stage_rows<typename Traits::Element, typename Traits::Swizzle, Rows>(c, to, thread);
  const int slab = Traits::kPartsAreRows ? 0 : part % 2;
  const int first = (Traits::kPartsAreRows ? part : part / 2) * 64;
  store_staged_rows(thread, [&](int row) {
    store_rows<Rows, 64>(p.dq, to + row * 128, slab, first + row, of_head % p.heads,
                         of_head / p.heads);
  });
}

}  // namespace tracea
