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

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_operands.cuh"
#include "tile/attention_order.cuh"
#include "tile/attention_sums.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/segment_map.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionKeysParams {
  const TensorMap *q, *k, *v, *d_out, *rows, *dk, *dv;  // see attention_sm90.cuh; of rows,
                                                        // (padded, planes, heads, batch)
  const TensorMap* bias;  // (keys, queries, heads, examples), or null
  const float* everywhere;  // (batch, kv_heads, head_dim), or null: what all dv have more
  const int* q_lengths;     // (batch), or null
  const int* kv_lengths;    // (batch), or null
  // Of segments, or null: (batch, padded_kv) ids, and spans (batch, tiles and blocks).
  const int* segments;
  const SegmentSpan *spans_kv, *spans_q;
  float* sums;  // of dq, or null; see tile/attention_sums.cuh
  int* turns;   // or null
  int batch, q_len, kv_len, kv_heads, padded_kv;
  int group;        // heads that share keys and values
  int left, right;  // of the window; not looked at if there is no limit
  int section;      // heads of keys, of all examples, of one section
  float scale;
  float scale_log2;  // scale log2(e), or cap log2(e)
  float to_cap;      // scale / cap, or 1 / cap where a bias is added
  GradientScoresParams scores;
};

// What is known of each query of a block, aligned as copies need it.
template <class Traits>
struct alignas(128) AttentionKeysRows {
  using Planes = QueryPlanes<Traits>;
  float planes[Planes::kCount][Traits::kBlockQ];

  // Where a plane's numbers of a thread's columns begin in shared memory.
  TRACEA_DEVICE u32 of(int plane, int thread) const {
    return shared_address(planes[plane]) + 4 * wgmma_accumulator_col(thread, 0);
  }
};

template <class Traits>
struct AttentionKeysShared {
  static constexpr int kSlabs = Traits::kSlabs, kValueSlabs = Traits::kValueSlabs;
  alignas(1024) u8 k[kSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 v[kValueSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 q[Traits::kStages][kSlabs][Traits::kBlockQ * 128];
  alignas(1024) u8 d_out[Traits::kStages][kValueSlabs][Traits::kBlockQ * 128];
  // Of each consumer's keys and a block of queries.
  BiasTiles<Traits::kStages * (Traits::kTileKv / 64),
            Traits::kBiasTiles ? Traits::kBlockQ * 128 : 0>
      bias;
  AttentionKeysRows<Traits> rows[Traits::kStages];
  u64 keys_full;
  u64 q_full[Traits::kStages], d_out_full[Traits::kStages], empty[Traits::kStages];
  // Of blocks of queries, if there are segments.
  SegmentMap<Traits::kSpans ? Traits::kMostBlocks : 32> map;
  AttentionSumsShared<Traits> sums;
};

template <class Traits>
struct AttentionKeys {
  using Element = typename Traits::Element;
  using Shared = AttentionKeysShared<Traits>;
  using Scores = typename Traits::Scores;  // k q', v do'
  using Sums = typename Traits::Sums;      // ds q
  using ValueSums = typename Traits::ValueSums;  // p do
  using State = PipelineState<Traits::kStages>;
  using Interval = KeyInterval<Traits::kHasRight, Traits::kHasLeft>;  // queries of a key
  static constexpr int kTileKv = Traits::kTileKv, kBlockQ = Traits::kBlockQ;
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kStages = Traits::kStages;
  using TileK = HeadTile<kTileKv, kHeadDim>;
  using TileV = HeadTile<kTileKv, kValueDim>;
  using TileQ = HeadTile<kBlockQ, kHeadDim>;
  using TileOut = HeadTile<kBlockQ, kValueDim>;
  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kSegments || Traits::kMapped;
  using Beside = GradientScores<Traits, true, kBlockQ>;

  static constexpr int kBands = kTileKv / 64;  // of 64 keys
  static constexpr int kConsumers = Traits::kSplits ? 2 : kBands;
  static constexpr int kHalf = 128;  // columns of a consumer, if it has not all
  // From a consumer's slabs to the next one's, or from its rows.
  static constexpr u32 kRowUnits = Traits::kSplits ? 0 : kConsumerUnits;
  static constexpr u32 kSumsUnits = Traits::kSplits ? 2 * TileQ::kSlabBytes / 16 : 0;
  static constexpr int kSteps = kBlockQ / 16;
  // Whether there are no registers for rounded p beside both p and v do'.
  static constexpr bool kIsTight = Traits::kAdds && kBlockQ == 128;
  using Planes = QueryPlanes<Traits>;
  static constexpr u32 kRowsBytes = Planes::kCount * kBlockQ * 4;
  static constexpr u32 kBiasBytes = Traits::kBiasTiles ? kBlockQ * 128 : 0;  // of a consumer
  // From the start of the keys.
  static constexpr u32 kUnitsToV = TileK::kUnits;
  static constexpr u32 kUnitsToQ = kUnitsToV + TileV::kUnits;
  static constexpr u32 kUnitsToDOut = kUnitsToQ + kStages * TileQ::kUnits;

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileKv % 64 == 0,
                "one producer warpgroup, and a consumer for 64 keys or for half of them");
  static_assert(!Traits::kSplits || (kBands == 1 && Traits::kSlabs == 4 &&
                                     Traits::kValueSlabs == 4 && !Traits::kAdds),
                "halves of two slabs");
  static_assert(!(Traits::kAdds && Traits::kMapped), "a map does not say who comes first");
  static_assert(kBlockQ % 16 == 0 && kBlockQ <= 256, "queries in one box, steps of 16");
  static_assert(Scores::kN == kBlockQ &&
                    Sums::kN == (Traits::kSplits ? kHalf : kHeadDim) &&
                    ValueSums::kN == (Traits::kSplits ? kHalf : kValueDim),
                "one instruction a step");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::k) == TileK::kBytes && sizeof(Shared::v) == TileV::kBytes &&
                    sizeof(Shared::q) == kStages * TileQ::kBytes,
                "operands lie one after another");

  const AttentionKeysParams& p;
  Shared& smem;
  AttentionTile tile;  // of keys
  int limit;           // keys of the example
  BlockRange range;    // of blocks of queries
  bool has_queries;

  // The `index`-th tile.
  TRACEA_DEVICE AttentionKeys(const AttentionKeysParams& params, Shared& shared, u32 index)
      : p(params), smem(shared) {
    const AttentionOrder order{ceil_div(p.kv_len, kTileKv), p.kv_heads, p.batch, p.section,
                               false};
    tile = order.at(index, kTileKv);
    limit = Traits::kKvLengths ? min(max(p.kv_lengths[tile.example], 0), p.kv_len) : p.kv_len;
    range = blocks(queries());
    has_queries = range.count() > 0;
    initialize();
    if constexpr (Traits::kSpans) {
      const SegmentSpan own =
          p.spans_kv[tile.example * ceil_div(p.kv_len, kTileKv) + tile.query / kTileKv];
      const i64 before = static_cast<i64>(tile.example) * ceil_div(p.q_len, kBlockQ);
      has_queries = smem.map.fill(range, own, p.spans_q + before);
    }
    if constexpr (Traits::kAdds) {
      if (threadIdx.x == 0) note_adding();
    }
    __syncthreads();
  }

  // --- what both roles know ----------------------------------------------------------

  // Of the last block of queries all are counted: their p are 0, see attention_rows.cuh.
  TRACEA_DEVICE Interval queries() const {
    const int count =
        Traits::kQLengths ? min(max(p.q_lengths[tile.example], 0), p.q_len) : p.q_len;
    return {p.q_len, round_up(count, kBlockQ), p.right, p.left};
  }

  TRACEA_DEVICE BlockRange blocks(const Interval& queries) const {
    const int end = min(tile.query + kTileKv, limit);
    if (tile.query >= end) return {0, 0, 0, 0};
    return queries.seen_blocks(tile.query, end - 1, kBlockQ);
  }

  // Calls with each head of those that share the keys and each block of queries, and whether
  // it is partial. Where tiles of keys wait for each other, all heads of a block come before
  // the next block: that the tile before has come to the last block frees all heads at once.
  template <bool kWarp, class Visit>
  TRACEA_DEVICE void walk(Visit one) const {
    if constexpr (Traits::kAdds) {
      const auto of_heads = [&](int block, bool is_partial) {
        TRACEA_NO_UNROLL
        for (int head = 0; head < p.group; ++head) one(head, block, is_partial);
      };
      if constexpr (Traits::kSpans) {
        smem.map.template walk_back<kWarp>(range, of_heads);
      } else {
        walk_range_back(range, of_heads);
      }
    } else {
      TRACEA_NO_UNROLL
      for (int head = 0; head < p.group; ++head) {
        const auto of_partial = [&](int block) { one(head, block, true); };
        const auto of_full = [&](int block) { one(head, block, false); };
        if constexpr (Traits::kMapped) {
          walk_map<kWarp>(map_of(head), range, [&](int block, bool is_partial) {
            one(head, block, is_partial);
          });
        } else if constexpr (Traits::kSpans) {
          smem.map.template walk<kWarp>(range, of_partial, of_full);
        } else {
          walk_range(range, of_partial, of_full);
        }
      }
    }
  }

  // The words of the tile; `head` of those that share the keys.
  TRACEA_DEVICE const u32* map_of(int head) const {
    const GradientScoresParams& of = p.scores;
    const int words = 2 * ceil_div(ceil_div(p.q_len, kBlockQ), 32);
    return of.map + tile.example * of.map_example +
           (tile.head * p.group + head) * of.map_head + tile.query / kTileKv * words;
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      mbarrier_init(shared_address(&smem.keys_full), full_arrivals());
      TRACEA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(shared_address(&smem.q_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.d_out_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty[i]), empty_arrivals(kConsumers, 1));
      }
      if constexpr (Traits::kAdds) AttentionSums<Traits>::initialize(smem.sums);
      fence_mbarrier_init();
      if (range.count() > 0) copy_keys();
    }
  }

  // They are on their way while the map is made, even if it then has no queries.
  TRACEA_DEVICE void copy_keys() const {
    const u32 full = shared_address(&smem.keys_full);
    mbarrier_arrive_expect_tx(full, TileK::kBytes + TileV::kBytes);
    TileK::copy(shared_address(smem.k[0]), p.k, tile.query, tile.head, tile.example, full);
    TileV::copy(shared_address(smem.v[0]), p.v, tile.query, tile.head, tile.example, full);
  }

  TRACEA_DEVICE static void wait(const u64& barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(shared_address(&barrier), parity)) {
    }
  }

  // --- producer: one thread ----------------------------------------------------------

  TRACEA_DEVICE void produce() const {
    if (!has_queries) return;
    State state;
    walk<false>([&](int head, int block, bool) {
      copy_queries(block, tile.head * p.group + head, state.stage_idx,
                   state.producer_parity());
      state.advance();
    });
  }

  TRACEA_DEVICE void copy_queries(int block, int head, int stage, u32 parity) const {
    wait(smem.empty[stage], parity);
    const u32 q_full = shared_address(&smem.q_full[stage]);
    mbarrier_arrive_expect_tx(q_full, TileQ::kBytes + kRowsBytes + kBands * kBiasBytes);
    TileQ::copy(shared_address(smem.q[stage][0]), p.q, block * kBlockQ, head, tile.example,
                q_full);
    cp_async_bulk_tensor_4d(shared_address(smem.rows[stage].planes[0]), p.rows,
                            block * kBlockQ, 0, head, tile.example, q_full);
    if constexpr (Traits::kBiasTiles) copy_bias(block, head, stage, q_full);
    const u32 d_out_full = shared_address(&smem.d_out_full[stage]);
    mbarrier_arrive_expect_tx(d_out_full, TileOut::kBytes);
    TileOut::copy(shared_address(smem.d_out[stage][0]), p.d_out, block * kBlockQ, head,
                  tile.example, d_out_full);
  }

  TRACEA_DEVICE void copy_bias(int block, int head, int stage, u32 full) const {
    TRACEA_UNROLL
    for (int i = 0; i < kBands; ++i) {
      cp_async_bulk_tensor_4d(bias_tile(stage, i), p.bias, tile.query + 64 * i,
                              block * kBlockQ, Traits::kBiasHeads ? head : 0,
                              Traits::kBiasExamples ? tile.example : 0, full);
    }
  }

  TRACEA_DEVICE u32 bias_tile(int stage, int consumer) const {
    if constexpr (Traits::kBiasTiles) {
      return shared_address(smem.bias.bytes[stage * kBands + (kBands > 1 ? consumer : 0)]);
    }
    return 0;
  }

  // --- adders: a warp for each consumer ----------------------------------------------

  // What adders need for each part, where it takes no registers: they have few.
  TRACEA_DEVICE void note_adding() const {
    AttentionAdding& to = smem.sums.adding;
    int count = range.count();
    if constexpr (Traits::kSpans) count = smem.map.counts[0] + smem.map.counts[1];
    to.count = has_queries ? count * p.group : 0;
    to.blocks = ceil_div(p.q_len, kBlockQ);
    to.first = (tile.example * p.kv_heads + tile.head) * p.group * to.blocks;
    to.tile = tile.query / kTileKv;
    if constexpr (Traits::kSegments) {
      to.of_queries = p.spans_q + static_cast<i64>(tile.example) * to.blocks;
      to.of_keys = p.spans_kv + static_cast<i64>(tile.example) * ceil_div(p.kv_len, kTileKv);
    }
  }

  // Of two warps each takes every second block, so that one may wait until its sums have
  // arrived while the other one adds.
  TRACEA_DEVICE static void add(const AttentionKeysParams& p, Shared& smem, int warp) {
    const volatile AttentionAdding& adding = smem.sums.adding;
    TRACEA_NO_UNROLL
    for (int i = warp; i < adding.count; i += 2) {
      wait(smem.sums.full[warp], i / 2 & 1);
      const AttentionPartPlace place = smem.sums.place[warp];
      const int turn = Traits::kOrdered ? earlier_tiles(p, smem, place.block) : 0;
      if (elect_one()) {
        const int index = adding.first + place.head * adding.blocks + place.block;
        AttentionSums<Traits>::add(smem.sums, p.sums, p.turns, index, turn);
      }
      __syncwarp();
    }
  }

  // Tiles before this one that see a block of queries which this one sees. A warp.
  TRACEA_DEVICE static int earlier_tiles(const AttentionKeysParams& p, const Shared& smem,
                                         int block) {
    const volatile AttentionAdding& adding = smem.sums.adding;
    const int first = block * kBlockQ;
    const int nearest = Traits::kHasLeft && first > p.left ? (first - p.left) / kTileKv : 0;
    if constexpr (!Traits::kSegments) return adding.tile - nearest;
    const SegmentSpan queries = adding.of_queries[block];
    int count = 0;
    TRACEA_NO_UNROLL
    for (int other = nearest + static_cast<int>(threadIdx.x) % kWarpSize;
         __any_sync(0xFFFFFFFFu, other < adding.tile); other += kWarpSize) {
      bool is_seen = false;
      if (other < adding.tile) {
        const SegmentSpan keys = adding.of_keys[other];
        is_seen = keys.low <= queries.high && queries.low <= keys.high;
      }
      count += __popc(__ballot_sync(0xFFFFFFFFu, is_seen));
    }
    return count;
  }

  // --- consumers: warpgroups ---------------------------------------------------------

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
      if constexpr (kIsTight) {
        round_block<Element>(weights, j,
                             {p_of[4 * j], p_of[4 * j + 1], p_of[4 * j + 2], p_of[4 * j + 3]});
      }
      round_block<Element>(rounded, j, c);
    }
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
    wait(smem.q_full[stage], at.state.consumer_parity());
    wgmma_fence();
    multiply_columns<Scores, TileK, TileQ>(s, k, q);
    // The products of the block before are done, and their operands' registers are free.
    wgmma_wait_group<1>();
    if (at.has_begun && thread == 0) {
      mbarrier_arrive(shared_address(&smem.empty[stage == 0 ? kStages - 1 : stage - 1]));
    }
    at.has_begun = true;
    wait(smem.d_out_full[stage], at.state.consumer_parity());
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
    if constexpr (kIsTight) {
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
    if constexpr (kIsTight) {
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
    if (range.count() > 0) wait(smem.keys_full, 0);
    if (has_queries) {
      if constexpr (Traits::kSegments) {
        const int* const ids = p.segments + static_cast<i64>(tile.example) * p.padded_kv;
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          at.ids[half] = ids[min(key + wgmma_accumulator_row(thread, 2 * half), p.kv_len - 1)];
        }
      }
      walk<true>([&](int head, int block, bool is_partial) {
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
    fence_proxy_async_shared();
    __syncwarp();
    if (!elect_one()) return;
    const int row = thread / kWarpSize * 16;
    store_slabs<Sums::kN>(p.dk, to_dk + row * 128, slab, key + row);
    store_slabs<ValueSums::kN>(p.dv, to_dv + row * 128, slab, key + row);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();  // shared memory must outlive the copies out of it
  }

  // Starts the copies of 16 rows of the consumer's columns, from slab `first` on.
  template <int kColumns>
  TRACEA_DEVICE void store_slabs(const TensorMap* map, u32 from, int first, int row) const {
    TRACEA_UNROLL
    for (int slab = 0; slab < ceil_div(kColumns, 64); ++slab) {
      cp_async_bulk_tensor_4d_store(map, from + slab * TileK::kSlabBytes, (first + slab) * 64,
                                    row, tile.head, tile.example);
    }
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
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  using Kernel = AttentionKeys<Traits>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(smem_bytes);
  const Kernel kernel(p, shared, index);
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (warp == 0 && elect_one()) kernel.produce();
    if constexpr (Traits::kAdds) {
      if (warp == 1 || warp == 2) Kernel::add(p, shared, warp - 1);
    }
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace tracea
