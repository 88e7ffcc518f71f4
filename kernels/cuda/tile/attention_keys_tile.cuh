// A tile of keys of attention_backward_keys_sm90: which blocks of queries see it, the copies of
// its operands, and the sums of dq that leave it. Consumers multiply in that file.
//
// One warp copies keys and values once, and each block of queries, of do and of the queries'
// numbers into a ring. With kAdds two more warps add parts of dq to sums in memory.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/attention_blocks.cuh"
#include "tile/attention_operands.cuh"
#include "tile/attention_order.cuh"
#include "tile/attention_sums.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/segment_map.cuh"

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

// Zeros in the place of a row of a tile, written by a thread.
template <class Tile>
TRACEA_DEVICE void clear_row(u32 tile, int row) {
  TRACEA_NO_UNROLL
  for (u32 byte = 0; byte < 128; byte += 4) {
    TRACEA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      st_shared(tile + slab * Tile::kSlabBytes + 128 * row + byte, 0u);
    }
  }
}

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
struct AttentionKeysTile {
  using Element = typename Traits::Element;
  using Shared = AttentionKeysShared<Traits>;
  using State = PipelineState<Traits::kStages>;
  using Interval = KeyInterval<Traits::kHasRight, Traits::kHasLeft>;  // queries of a key
  static constexpr int kTileKv = Traits::kTileKv, kBlockQ = Traits::kBlockQ;
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kStages = Traits::kStages;
  using TileK = HeadTile<kTileKv, kHeadDim>;
  using TileV = HeadTile<kTileKv, kValueDim>;
  using TileQ = HeadTile<kBlockQ, kHeadDim>;
  using TileOut = HeadTile<kBlockQ, kValueDim>;
  static constexpr int kBands = kTileKv / 64;  // of 64 keys
  static constexpr int kConsumers = Traits::kSplits ? 2 : kBands;
  using Planes = QueryPlanes<Traits>;
  static constexpr u32 kRowsBytes = Planes::kCount * kBlockQ * 4;
  static constexpr u32 kBiasBytes = Traits::kBiasTiles ? kBlockQ * 128 : 0;  // of a consumer

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileKv % 64 == 0,
                "one producer warpgroup, and a consumer for 64 keys or for half of them");
  static_assert(!Traits::kSplits || (kBands == 1 && Traits::kSlabs == 4 &&
                                     Traits::kValueSlabs == 4 && !Traits::kAdds),
                "halves of two slabs");
  static_assert(!(Traits::kAdds && Traits::kMapped), "a map does not say who comes first");
  static_assert(!(Traits::kFromEnd && Traits::kHasLeft),
                "the tiles before one are counted from positions that all examples share");
  static_assert(kBlockQ % 16 == 0 && kBlockQ <= 256, "queries in one box, steps of 16");
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
  TRACEA_DEVICE AttentionKeysTile(const AttentionKeysParams& params, Shared& shared, u32 index)
      : p(params), smem(shared) {
    const AttentionOrder order{ceil_div(p.kv_len, kTileKv), p.kv_heads, p.batch, p.section,
                               false};
    tile = order.at(index, kTileKv);
    limit = positions<Traits::kKvLengths>(p.kv_lengths, tile.example, p.kv_len);
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
  // With kFromEnd the last query stands at the last key of its example.
  TRACEA_DEVICE Interval queries() const {
    const int count = positions<Traits::kQLengths>(p.q_lengths, tile.example, p.q_len);
    const int ahead = Traits::kFromEnd ? limit - count : 0;
    return {p.q_len, round_up(count, kBlockQ), p.right + ahead, p.left - ahead};
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
    wait_for(smem.empty[stage], parity);
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
      wait_for(smem.sums.full[warp], i / 2 & 1);
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
};

}  // namespace tracea
