// attention_backward_queries_sm90: the gradient of the queries of attention, on Hopper.
//
//     p = 2^(scale log2(e) q k' - exponent)    where query and key see each other, else 0
//     ds = p * (do v' - delta)                 exponent, delta: see attention_rows.cuh
//     dq = scale ds k
//
// With a cap or a bias p and ds are those of attention_backward_keys_sm90.cuh.
//
// A block owns kTileQ queries of one head, each of the consumers, a warpgroup, 64 of them.
// One warp copies queries and do once, and blocks of kBlockKv keys and values into two rings:
//
//   for each block of keys that the tile sees:
//     s = q k'        | while it waits, dq of the block before
//     t = do v'       | weights p of s
//     ds = p * (t - delta)
//     dq += ds k
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_blocks.cuh"
#include "tile/attention_operands.cuh"
#include "tile/attention_order.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/segment_map.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionQueriesParams {
  const TensorMap *q, *k, *v, *d_out, *dq;  // see attention_sm90.cuh
  const TensorMap* bias;                    // (keys, queries, heads, examples), or null
  const TensorMap* segments;                // of ids of keys, (padded, batch), or null
  const float* rows;                        // (batch, heads, planes, padded)
  const int* q_lengths;                     // (batch), or null
  const int* kv_lengths;                    // (batch), or null
  const SegmentSpan *spans_q, *spans_kv;    // (batch, tiles and blocks), or null
  int batch, q_len, kv_len, heads, padded;
  int group;        // heads that share keys and values
  int left, right;  // of the window; not looked at if there is no limit
  int section;      // heads, of all examples, of one section
  float scale;
  float scale_log2;  // scale log2(e), or cap log2(e)
  float to_cap;      // scale / cap, or 1 / cap where a bias is added
  GradientScoresParams scores;
};

template <class Traits>
struct AttentionQueriesShared {
  static constexpr int kSlabs = Traits::kSlabs, kValueSlabs = Traits::kValueSlabs;
  alignas(1024) u8 q[kSlabs][Traits::kTileQ * 128];
  alignas(1024) u8 d_out[kValueSlabs][Traits::kTileQ * 128];
  alignas(1024) u8 k[Traits::kStages][kSlabs][Traits::kBlockKv * 128];
  alignas(1024) u8 v[Traits::kStages][kValueSlabs][Traits::kBlockKv * 128];
  // Of the tile's queries and a block of keys, in slabs of 64 keys.
  BiasTiles<Traits::kStages,
            Traits::kBiasTiles ? ceil_div(Traits::kBlockKv, 64) * Traits::kTileQ * 128 : 0>
      bias;
  // Of a block of keys, each where a copy may begin.
  alignas(128) int segments[Traits::kStages][round_up(Traits::kBlockKv, 32)];
  u64 queries_full;
  u64 k_full[Traits::kStages], k_empty[Traits::kStages];
  u64 v_full[Traits::kStages], v_empty[Traits::kStages];
  // Of blocks of keys, if there are segments.
  SegmentMap<Traits::kSpans ? Traits::kMostBlocks : 32> map;
};

template <class Traits>
struct AttentionQueries {
  using Element = typename Traits::Element;
  using Shared = AttentionQueriesShared<Traits>;
  using Scores = typename Traits::Scores;  // q k', do v'
  using Sums = typename Traits::Sums;      // ds k
  using State = PipelineState<Traits::kStages>;
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;
  static constexpr int kTileQ = Traits::kTileQ, kBlockKv = Traits::kBlockKv;
  static constexpr int kHeadDim = Traits::kHeadDim, kStages = Traits::kStages;
  using TileQ = HeadTile<kTileQ, kHeadDim>;
  using TileOut = HeadTile<kTileQ, Traits::kValueDim>;
  using TileK = HeadTile<kBlockKv, kHeadDim>;
  using TileV = HeadTile<kBlockKv, Traits::kValueDim>;

  using Beside = GradientScores<Traits, false, kBlockKv>;

  static constexpr int kConsumers = kTileQ / 64;
  static constexpr int kSteps = kBlockKv / 16;
  static constexpr int kBiasSlabs = Traits::kBiasTiles ? ceil_div(kBlockKv, 64) : 0;
  static constexpr u32 kBiasSlabBytes = kTileQ * 128;
  // From the start of the queries.
  static constexpr u32 kUnitsToDOut = TileQ::kUnits;
  static constexpr u32 kUnitsToK = kUnitsToDOut + TileOut::kUnits;
  static constexpr u32 kUnitsToV = kUnitsToK + kStages * TileK::kUnits;

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileQ % 64 == 0,
                "one producer warpgroup, and a consumer for 64 queries");
  static_assert(kBlockKv % 16 == 0 && kBlockKv <= 256, "keys in one box, steps of 16");
  static_assert(Scores::kN == kBlockKv && Sums::kN == kHeadDim, "one instruction a step");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::q) == TileQ::kBytes &&
                    sizeof(Shared::d_out) == TileOut::kBytes &&
                    sizeof(Shared::k) == kStages * TileK::kBytes,
                "operands lie one after another");

  const AttentionQueriesParams& p;
  Shared& smem;
  AttentionTile tile;
  BlockRange range;  // of blocks of keys
  bool has_keys;

  // The `index`-th tile.
  TRACEA_DEVICE AttentionQueries(const AttentionQueriesParams& params, Shared& shared, u32 index)
      : p(params), smem(shared) {
    const AttentionOrder order{ceil_div(p.q_len, kTileQ), p.heads, p.batch, p.section,
                               Traits::kHasRight};
    tile = order.at(index, kTileQ);
    range = blocks(keys());
    has_keys = range.count() > 0;
    initialize();
    if constexpr (Traits::kSpans) {
      const SegmentSpan own =
          p.spans_q[tile.example * ceil_div(p.q_len, kTileQ) + tile.query / kTileQ];
      const i64 before = static_cast<i64>(tile.example) * ceil_div(p.kv_len, kBlockKv);
      has_keys = smem.map.fill(range, own, p.spans_kv + before);
    }
    __syncthreads();
  }

  // --- what both roles know ----------------------------------------------------------

  TRACEA_DEVICE Interval keys() const {
    const int limit = positions<Traits::kKvLengths>(p.kv_lengths, tile.example, p.kv_len);
    const int ahead = Traits::kFromEnd ? limit - query_count() : 0;
    return {p.kv_len, limit, p.left - ahead, p.right + ahead};
  }

  // Queries of the example.
  TRACEA_DEVICE int query_count() const {
    return positions<Traits::kQLengths>(p.q_lengths, tile.example, p.q_len);
  }

  TRACEA_DEVICE BlockRange blocks(const Interval& keys) const {
    const int count = query_count();
    if (tile.query >= count) return {0, 0, 0, 0};
    return keys.seen_blocks(tile.query, min(tile.query + kTileQ, count) - 1, kBlockKv);
  }

  template <bool kWarp, class Partial, class Full>
  TRACEA_DEVICE void walk(Partial of_partial, Full of_full) const {
    if constexpr (Traits::kMapped) {
      walk_map<kWarp>(map(), range, [&](int block, bool is_partial) {
        if (is_partial) {
          of_partial(block);
        } else {
          of_full(block);
        }
      });
    } else if constexpr (Traits::kSpans) {
      smem.map.template walk<kWarp>(range, of_partial, of_full);
    } else {
      walk_range(range, of_partial, of_full);
    }
  }

  // The words of the tile.
  TRACEA_DEVICE const u32* map() const {
    const GradientScoresParams& of = p.scores;
    const int words = 2 * ceil_div(ceil_div(p.kv_len, kBlockKv), 32);
    return of.map + tile.example * of.map_example + tile.head * of.map_head +
           tile.query / kTileQ * words;
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      mbarrier_init(shared_address(&smem.queries_full), full_arrivals());
      TRACEA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(shared_address(&smem.k_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.v_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.k_empty[i]), empty_arrivals(kConsumers, 1));
        mbarrier_init(shared_address(&smem.v_empty[i]), empty_arrivals(kConsumers, 1));
      }
      fence_mbarrier_init();
      if (range.count() > 0) copy_queries();
    }
  }

  // They are on their way while the map is made, even if it then has no keys.
  TRACEA_DEVICE void copy_queries() const {
    const u32 full = shared_address(&smem.queries_full);
    mbarrier_arrive_expect_tx(full, TileQ::kBytes + TileOut::kBytes);
    TileQ::copy(shared_address(smem.q[0]), p.q, tile.query, tile.head, tile.example, full);
    TileOut::copy(shared_address(smem.d_out[0]), p.d_out, tile.query, tile.head, tile.example,
                  full);
  }

  // --- producer: one thread ----------------------------------------------------------

  TRACEA_DEVICE void produce() const {
    if (!has_keys) return;
    State state;
    const int head = tile.head / p.group;
    const auto copy = [&](int block) {
      const int stage = state.stage_idx;
      copy_block<TileK>(smem.k[stage][0], p.k, block, head, smem.k_full[stage], smem.k_empty[stage],
                 state.producer_parity(),
                 (Traits::kSegments ? 4 * kBlockKv : 0) + kBiasSlabs * kBiasSlabBytes);
      if constexpr (Traits::kBiasTiles) copy_bias(block, stage);
      if constexpr (Traits::kSegments) {
        cp_async_bulk_tensor_4d(shared_address(smem.segments[stage]), p.segments,
                                block * kBlockKv, tile.example, 0, 0,
                                shared_address(&smem.k_full[stage]));
      }
      copy_block<TileV>(smem.v[stage][0], p.v, block, head, smem.v_full[stage], smem.v_empty[stage],
                 state.producer_parity(), 0);
      state.advance();
    };
    walk<false>(copy, copy);
  }

  template <class Tile>
  TRACEA_DEVICE void copy_block(const u8* to, const TensorMap* map, int block, int head,
                                const u64& full, const u64& empty, u32 parity,
                                u32 more_bytes) const {
    wait_for(empty, parity);
    const u32 barrier = shared_address(&full);
    mbarrier_arrive_expect_tx(barrier, Tile::kBytes + more_bytes);
    Tile::copy(shared_address(to), map, block * kBlockKv, head, tile.example, barrier);
  }

  TRACEA_DEVICE void copy_bias(int block, int stage) const {
    TRACEA_UNROLL
    for (int slab = 0; slab < kBiasSlabs; ++slab) {
      cp_async_bulk_tensor_4d(bias_tile(stage, 0) + slab * kBiasSlabBytes, p.bias,
                              block * kBlockKv + slab * 64, tile.query,
                              Traits::kBiasHeads ? tile.head : 0,
                              Traits::kBiasExamples ? tile.example : 0,
                              shared_address(&smem.k_full[stage]));
    }
  }

  TRACEA_DEVICE u32 bias_tile(int stage, int consumer) const {
    if constexpr (Traits::kBiasTiles) {
      return shared_address(smem.bias.bytes[stage]) + consumer * 64 * 128;
    }
    return 0;
  }

  // --- consumers: warpgroups ---------------------------------------------------------

  struct Progress {
    float dq[Sums::kAccumulators];
    QueryNumbers<Traits> rows;
    State state;
    bool has_begun;
  };

  // One block of keys. Its last product is not waited for.
  template <bool kMasks>
  TRACEA_DEVICE void step(Progress& at, int block, u32 start, const Interval& keys, int query,
                          int consumer, int thread) const {
    float s[Scores::kAccumulators], t[Scores::kAccumulators];
    u32 ds[kSteps][4];
    const int stage = at.state.stage_idx;
    const u32 q = start + consumer * kConsumerUnits, d_out = q + kUnitsToDOut;
    const u32 k = start + kUnitsToK + stage * TileK::kUnits;
    const u32 v = start + kUnitsToV + stage * TileV::kUnits;
    wait_for(smem.k_full[stage], at.state.consumer_parity());
    wgmma_fence();
    multiply_columns<Scores, TileQ, TileK>(s, q, k);
    wait_for(smem.v_full[stage], at.state.consumer_parity());
    multiply_columns<Scores, TileOut, TileV>(t, d_out, v);
    wgmma_wait_group<1>();
    wgmma_fence_operands(s);
    const Beside beside{p.scores, tile.head, tile.example, query, block * kBlockKv};
    if (at.has_begun && thread == 0) {
      mbarrier_arrive(shared_address(&smem.k_empty[stage == 0 ? kStages - 1 : stage - 1]));
    }
    at.has_begun = true;
    if constexpr (Beside::kMoves) {
      beside.template add<typename Traits::Swizzle, kBiasSlabBytes>(
          s, bias_tile(stage, consumer), thread);
    }
    if constexpr (Traits::kSoftCap) soft_cap(s, p.to_cap);
    at.rows.weigh(s, p.scale_log2);
    if constexpr (kMasks) {
      const u32 ids =
          shared_address(smem.segments[stage]) + 4 * wgmma_accumulator_col(thread, 0);
      hide_keys<Traits>(s, keys, query, block * kBlockKv, at.rows.ids, thread,
                        [&](int j, u32(&of_keys)[2]) {
                          ld_shared(ids + 32 * j, of_keys[0], of_keys[1]);
                        });
      if constexpr (Traits::kMaskBits) beside.mask(s, block, thread);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operands(t);
    if (thread == 0) mbarrier_arrive(shared_address(&smem.v_empty[stage]));
    TRACEA_UNROLL
    for (int j = 0; j < kBlockKv / 8; ++j) {
      float c[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c[i] = s[4 * j + i] * (t[4 * j + i] - at.rows.delta[i / 2]);
        if constexpr (Traits::kSoftCap) {
          c[i] *= soft_cap_slope(s[4 * j + i], at.rows.exponent[i / 2], rcp_approx(p.scale_log2));
        }
      }
      round_block<Element>(ds, j, c);
    }
    wgmma_fence();
    multiply_rows<Sums, TileK>(at.dq, ds, k);
    at.state.advance();
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const u32 start = shared_address(smem.q[0]) / 16;
    const Interval keys = this->keys();
    const int query = tile.query + consumer * 64;
    Progress at;
    at.has_begun = false;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) at.dq[i] = 0.0f;
    if (range.count() > 0) wait_for(smem.queries_full, 0);
    if (has_keys) {
      const i64 heads_before = static_cast<i64>(tile.example) * p.heads + tile.head;
      at.rows.load(p.rows, heads_before, p.padded, query, thread);
      walk<true>(
          [&](int block) { step<true>(at, block, start, keys, query, consumer, thread); },
          [&](int block) { step<false>(at, block, start, keys, query, consumer, thread); });
      wgmma_wait_group<0>();
      wgmma_fence_operands(at.dq);
    }
    finish(at.dq, query, consumer, thread);
  }

  // Stores the consumer's rows, staged where its queries were. Queries past those of the
  // example have no gradient, whatever lies there.
  TRACEA_DEVICE void finish(float (&dq)[Sums::kAccumulators], int query, int consumer,
                            int thread) const {
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) dq[i] *= p.scale;
    if constexpr (Traits::kQLengths) {
      const int count = query_count() - query;
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) {
        if (wgmma_accumulator_row(thread, i) >= count) dq[i] = 0.0f;
      }
    }
    meet_warpgroup(consumer);  // all of it have multiplied their queries
    const u32 to = shared_address(smem.q[0]) + consumer * 64 * 128;
    stage_rows<Element, typename Traits::Swizzle, TileQ>(dq, to, thread);
    store_staged_rows(thread, [&](int row) {
      store_rows<TileQ, kHeadDim>(p.dq, to + row * 128, 0, query + row, tile.head,
                                  tile.example);
    });
  }
};

template <class Traits>
TRACEA_DEVICE void attention_backward_queries_sm90(const AttentionQueriesParams& p,
                                               u32 index = blockIdx.x) {
  using Kernel = AttentionQueries<Traits>;
  run_roles<Traits>(Kernel(p, shared_memory<typename Kernel::Shared>(), index));
}

}  // namespace tracea
