// attention_backward_keys_sm90: the gradients of keys and values of attention, on Hopper.
//
//     p = 2^(scale log2(e) q k' - exponent)    where query and key see each other, else 0
//     ds = p * (do v' - delta)                 exponent, delta: see attention_rows.cuh
//     dv = p' do        dk = scale ds' q       summed over the queries of all heads that
//                                              share the keys
//
// With a cap p is 2^(cap log2(e) tanh(scale q k' / cap) - exponent), and ds is multiplied by
// the derivative of tanh. A bias is added to scale q k' (tile/gradient_scores.cuh).
//
// A block owns kTileKv keys of one head. One warp copies them and their values, and blocks
// of kBlockQ queries, of do and of the two numbers of each query into a ring, by tensor map.
// Each of the consumers, a warpgroup, owns 64 of the keys, and computes transposed scores, so
// that what it multiplies next is in its registers:
//
//   for each head that shares the keys, for each block of queries that sees them:
//     s = k q'        | while it waits, dk of the block before
//     t = v do'       | weights p of s
//     dv += p do      | ds = p * (t - delta)
//     dk += ds q
//
// Of heads wider than a consumer has registers for (kSplits) two consumers share 64 keys: both
// compute all scores, and each half of the columns of dk and of dv.
//
// With kAdds each step also multiplies ds by the keys, and two more warps add that to the sums
// of dq in memory (tile/attention_sums.cuh); else dq is another kernel's, and nothing is added
// in memory. Which queries see a tile of keys is what tile/key_range.cuh says with both in
// each other's place, and with a mask (kMapped) what a map of blocks says.
#pragma once

#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_blocks.cuh"
#include "tile/attention_keys_tile.cuh"
#include "tile/attention_operands.cuh"
#include "tile/attention_sums.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/opaque.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct AttentionKeys : AttentionKeysTile<Traits> {
  using Tile = AttentionKeysTile<Traits>;
  using typename Tile::Element;
  using typename Tile::State;
  using typename Tile::Interval;
  using typename Tile::Planes;
  using typename Tile::TileK;
  using typename Tile::TileV;
  using typename Tile::TileQ;
  using typename Tile::TileOut;
  using Tile::p, Tile::smem, Tile::tile, Tile::limit, Tile::range, Tile::has_queries,
      Tile::kBlockQ, Tile::kHeadDim, Tile::kValueDim, Tile::kStages, Tile::kConsumers,
      Tile::kBiasBytes, Tile::bias_tile;
  using Scores = typename Traits::Scores;        // k q', v do'
  using Sums = typename Traits::Sums;            // ds q
  using ValueSums = typename Traits::ValueSums;  // p do
  using Beside = GradientScores<Traits, true, kBlockQ>;

  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kSegments || Traits::kMapped;
  static constexpr int kHalf = 128;  // columns of a consumer, if it has not all
  // From a consumer's slabs to the next one's, or from its rows.
  static constexpr u32 kRowUnits = Traits::kSplits ? 0 : kConsumerUnits;
  static constexpr u32 kSumsUnits = Traits::kSplits ? 2 * TileQ::kSlabBytes / 16 : 0;
  static constexpr int kSteps = kBlockQ / 16;
  // From the start of the keys.
  static constexpr u32 kUnitsToV = TileK::kUnits;
  static constexpr u32 kUnitsToQ = kUnitsToV + TileV::kUnits;
  static constexpr u32 kUnitsToDOut = kUnitsToQ + kStages * TileQ::kUnits;

  static_assert(Scores::kN == kBlockQ &&
                    Sums::kN == (Traits::kSplits ? kHalf : kHeadDim) &&
                    ValueSums::kN == (Traits::kSplits ? kHalf : kValueDim),
                "one instruction a step");

  TRACEA_DEVICE AttentionKeys(const AttentionKeysParams& params,
                              AttentionKeysShared<Traits>& shared, u32 index)
      : Tile(params, shared, index) {}

  struct Progress {
    float dk[Sums::kAccumulators], dv[ValueSums::kAccumulators];
    State state;
    bool has_begun;
    int ids[2];  // segments of the thread's two keys
  };

  // p of the consumer's keys and a block of queries, in the place of their scores.
  TRACEA_DEVICE void weigh(float (&s)[Scores::kAccumulators], int stage, int thread) const {
    const u32 exponents = smem.rows[stage].of(0, thread);
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      const Pair exponent = ld_shared_pair(exponents + 32 * j);
      Pair cap;
      if constexpr (Traits::kBiased) {
        cap = ld_shared_pair(exponents + 4 * kBlockQ * Planes::kCaps + 32 * j);
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float shift = i % 2 ? exponent.y : exponent.x;
        s[4 * j + i] = ex2_approx(fmaf(s[4 * j + i], p.scale_log2, -shift));
        if constexpr (Traits::kBiased) {
          s[4 * j + i] = min_nan(s[4 * j + i], i % 2 ? cap.y : cap.x);
        }
      }
    }
  }

  // p = 0 where query and key do not see each other.
  TRACEA_DEVICE void mask(float (&s)[Scores::kAccumulators], const Interval& queries,
                          const int (&ids)[2], int block, int key, int stage,
                          int thread) const {
    const int column = wgmma_accumulator_col(thread, 0);
    const u32 of_queries = smem.rows[stage].of(Planes::kIds, thread);
    int begin[2], end[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = key + wgmma_accumulator_row(thread, 2 * half);
      begin[half] = queries.begin(row) - block * kBlockQ - column;
      end[half] = queries.end(row) - block * kBlockQ - column;
    }
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      u32 segments[2] = {};
      if constexpr (Traits::kSegments) {
        ld_shared(of_queries + 32 * j, segments[0], segments[1]);
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int q = 8 * j + i % 2;
        const bool is_seen =
            (!Traits::kHasRight || q >= begin[i / 2]) &&
            (!Traits::kHasLeft || q < end[i / 2]) &&
            (!Traits::kSegments || static_cast<int>(segments[i % 2]) == ids[i / 2]);
        s[4 * j + i] = is_seen ? s[4 * j + i] : 0.0f;
      }
    }
  }

  TRACEA_DEVICE static void round(u32 (&rounded)[kSteps][4],
                                  const float (&c)[Scores::kAccumulators]) {
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      round_block<Element>(rounded, j, {c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]});
    }
  }

  // ds = p * (t - delta), rounded; and p, if it was not before.
  TRACEA_DEVICE void differentiate(const float (&p_of)[Scores::kAccumulators],
                                   const float (&t)[Scores::kAccumulators],
                                   u32 (&weights)[kSteps][4], u32 (&rounded)[kSteps][4],
                                   int stage, int thread) const {
    const u32 exponents = smem.rows[stage].of(0, thread);
    const u32 deltas = exponents + 4 * kBlockQ;
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      const Pair delta = ld_shared_pair(deltas + 32 * j);
      Pair exponent;
      if constexpr (Traits::kSoftCap) exponent = ld_shared_pair(exponents + 32 * j);
      float c[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c[i] = p_of[4 * j + i] * (t[4 * j + i] - (i % 2 ? delta.y : delta.x));
        if constexpr (Traits::kSoftCap) {
          c[i] *= soft_cap_slope(p_of[4 * j + i], i % 2 ? exponent.y : exponent.x,
                                 rcp_approx(p.scale_log2));
        }
      }
      if constexpr (Traits::kIsTight) {
        round_block<Element>(weights, j,
                             {p_of[4 * j], p_of[4 * j + 1], p_of[4 * j + 2], p_of[4 * j + 3]});
      }
      round_block<Element>(rounded, j, c);
    }
  }

  // Queries without a gradient, and their cotangents, become zeros: a weight of zero times
  // NaN would be NaN. Those past the example's are the last ones of a block.
  TRACEA_DEVICE void clear_padding(const State& state) const {
    const int stage = opaque(state.stage_idx);
    const u32 exponents = shared_address(smem.rows[stage].planes[0]);
    if (has_gradient(exponents, kBlockQ - 1)) return;
    wait_for(smem.d_out_full[stage], state.consumer_parity());
    TRACEA_NO_UNROLL
    for (int row = opaque(static_cast<int>(threadIdx.x)) % kWarpgroupSize; row < kBlockQ;
         row += kWarpgroupSize) {
      if (has_gradient(exponents, row)) continue;
      clear_row<TileQ>(shared_address(smem.q[stage][0]), row);
      clear_row<TileOut>(shared_address(smem.d_out[stage][0]), row);
    }
    fence_proxy_async_shared();
    consumers_barrier<kConsumers * kWarpgroupSize>();  // all meet the same blocks
  }

  // Whether a query of a block has one, by its exponent; see attention_rows.cuh.
  TRACEA_DEVICE static bool has_gradient(u32 exponents, int row) {
    u32 bits;
    ld_shared(exponents + 4 * row, bits);
    return bits != 0x7F800000u;
  }

  // One block of queries of one head. Its last products are not waited for.
  TRACEA_DEVICE void step(Progress& at, int head, int block, bool is_partial, u32 start,
                          const Interval& queries, int key, int consumer, int thread) const {
    float s[Scores::kAccumulators], t[Scores::kAccumulators];
    u32 weights[kSteps][4], ds[kSteps][4];
    const int stage = at.state.stage_idx;
    const u32 k = start + consumer * kRowUnits, v = k + kUnitsToV;
    const u32 q = start + kUnitsToQ + stage * TileQ::kUnits;
    const u32 d_out = start + kUnitsToDOut + stage * TileOut::kUnits;
    const u32 own_q = q + consumer * kSumsUnits, own_d_out = d_out + consumer * kSumsUnits;
    wait_for(smem.q_full[stage], at.state.consumer_parity());
    if constexpr (Traits::kQLengths) clear_padding(at.state);
    wgmma_fence();
    multiply_columns<Scores, TileK, TileQ>(s, k, q);
    // The products of the block before are done, and their operands' registers are free.
    wgmma_wait_group<1>();
    if (at.has_begun && thread == 0) {
      mbarrier_arrive(shared_address(&smem.empty[stage == 0 ? kStages - 1 : stage - 1]));
    }
    at.has_begun = true;
    wait_for(smem.d_out_full[stage], at.state.consumer_parity());
    multiply_columns<Scores, TileV, TileOut>(t, v, d_out);
    wgmma_wait_group<1>();
    wgmma_fence_operands(s);
    const Beside beside{p.scores, tile.head * p.group + head, tile.example, key,
                        block * kBlockQ};
    if constexpr (Beside::kMoves) {
      beside.template add<typename Traits::Swizzle, kBiasBytes>(s, bias_tile(stage, consumer),
                                                                thread);
    }
    if constexpr (Traits::kSoftCap) soft_cap(s, p.to_cap);
    weigh(s, stage, thread);
    if (kHasPartial && is_partial) {
      mask(s, queries, at.ids, block, key, stage, thread);
      if constexpr (Traits::kMaskBits) beside.mask(s, block, thread);
    }
    if constexpr (Traits::kIsTight) {
      wgmma_wait_group<0>();
      wgmma_fence_operands(t);
    } else {
      round(weights, s);
      wgmma_fence();
      multiply_rows<ValueSums, TileOut>(at.dv, weights, own_d_out);
      wgmma_wait_group<1>();
      wgmma_fence_operands(t);
    }
    differentiate(s, t, weights, ds, stage, thread);
    if constexpr (Traits::kIsTight) {
      wgmma_fence();
      multiply_rows<ValueSums, TileOut>(at.dv, weights, d_out);
    }
    if constexpr (Traits::kAdds) {
      using Parts = AttentionSums<Traits>;
      static_assert(kStages == 2, "stages tell even blocks from odd ones");
      Parts::share(smem.sums, stage, ds, consumer, thread);
      consumers_barrier<kConsumers * kWarpgroupSize>();
      wgmma_fence();
      float dq[32];
      Parts::multiply(dq, smem.sums, stage, start, consumer);
      multiply_rows<Sums, TileQ>(at.dk, ds, q);
      wgmma_wait_group<1>();
      wgmma_fence_operands(dq);
      Parts::stage(smem.sums, dq, {head, block}, stage, consumer,
                   thread);
    } else {
      wgmma_fence();
      multiply_rows<Sums, TileQ>(at.dk, ds, own_q);
    }
    at.state.advance();
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const u32 start = shared_address(smem.k[0]) / 16;
    const Interval queries = this->queries();
    const int key = tile.query + (Traits::kSplits ? 0 : consumer * 64);
    Progress at;
    at.has_begun = false;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) at.dk[i] = 0.0f;
    TRACEA_UNROLL
    for (int i = 0; i < ValueSums::kAccumulators; ++i) at.dv[i] = 0.0f;
    if (range.count() > 0) wait_for(smem.keys_full, 0);
    if (has_queries) {
      if constexpr (Traits::kSegments) {
        const int* const ids = p.segments + static_cast<i64>(tile.example) * p.padded_kv;
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          at.ids[half] = ids[min(key + wgmma_accumulator_row(thread, 2 * half), p.kv_len - 1)];
        }
      }
      this->template walk<true>([&](int head, int block, bool is_partial) {
        step(at, head, block, is_partial, start, queries, key, consumer, thread);
      });
      wgmma_wait_group<0>();
      wgmma_fence_operands(at.dk);
      wgmma_fence_operands(at.dv);
    }
    finish(at, key, consumer, thread);
  }

  // Stores the consumer's rows, staged where its keys and values were.
  TRACEA_DEVICE void finish(Progress& at, int key, int consumer, int thread) const {
    scale_rows(at.dk, key, thread, p.scale);
    scale_rows(at.dv, key, thread, 1.0f);
    if constexpr (Traits::kEverywhere) add_everywhere(at.dv, consumer, thread);
    if constexpr (Traits::kAdds || Traits::kSplits) {  // all have multiplied all keys
      consumers_barrier<kConsumers * kWarpgroupSize>();
    } else {
      meet_warpgroup(consumer);  // all of it have multiplied their keys and values
    }
    const int slab = Traits::kSplits ? 2 * consumer : 0;
    const u32 to_own = Traits::kSplits ? 0 : consumer * 64 * 128;
    const u32 to_dk = shared_address(smem.k[slab]) + to_own;
    const u32 to_dv = shared_address(smem.v[slab]) + to_own;
    stage_rows<Element, typename Traits::Swizzle, TileK>(at.dk, to_dk, thread);
    stage_rows<Element, typename Traits::Swizzle, TileV>(at.dv, to_dv, thread);
    store_staged_rows(thread, [&](int row) {
      store_rows<TileK, Sums::kN>(p.dk, to_dk + row * 128, slab, key + row, tile.head,
                                  tile.example);
      store_rows<TileV, ValueSums::kN>(p.dv, to_dv + row * 128, slab, key + row, tile.head,
                                       tile.example);
    });
  }

  // Rows of keys past the limit become zeros.
  template <int kCount>
  TRACEA_DEVICE void scale_rows(float (&sums)[kCount], int key, int thread,
                                float factor) const {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const bool is_key = key + wgmma_accumulator_row(thread, 2 * half) < limit;
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
        sums[i] = is_key ? sums[i] * factor : 0.0f;
        sums[i + 1] = is_key ? sums[i + 1] * factor : 0.0f;
      }
    }
  }

  // What queries that see no key, and take the mean of all values, add to every dv.
  TRACEA_DEVICE void add_everywhere(float (&dv)[ValueSums::kAccumulators], int consumer,
                                    int thread) const {
    const float* const row =
        p.everywhere + (static_cast<i64>(tile.example) * p.kv_heads + tile.head) * kValueDim;
    TRACEA_UNROLL
    for (int block = 0; block < ValueSums::kN / 8; ++block) {
      const int first = Traits::kSplits ? consumer * kHalf : 0;
      const int column = first + wgmma_accumulator_col(thread, 4 * block);
      if (Traits::kSplits && column >= kValueDim) break;
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) dv[4 * block + i] += row[column + i % 2];
    }
  }
};

template <class Traits>
TRACEA_DEVICE void attention_backward_keys_sm90(const AttentionKeysParams& p,
                                               u32 index = blockIdx.x) {
  using Kernel = AttentionKeys<Traits>;
  auto& shared = shared_memory<typename Kernel::Shared>();
  run_roles<Traits>(Kernel(p, shared, index), [&](int warp) {
    if constexpr (Traits::kAdds) {
      if (warp == 1 || warp == 2) Kernel::add(p, shared, warp - 1);
    }
  });
}

}  // namespace tracea
