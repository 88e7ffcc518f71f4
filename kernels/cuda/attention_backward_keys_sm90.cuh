// attention_backward_keys_sm90: the gradients of keys and values of attention, on Hopper.
//
//     p = 2^(scale log2(e) q k' - exponent)    where query and key see each other, else 0
//     ds = p * (do v' - delta)                 exponent, delta: see attention_rows.cuh
//     dv = p' do        dk = scale ds' q       summed over the queries of all heads that
//                                              share the keys
//
// A block computes tiles of kTileKv keys of one head, one after another: those that it draws
// from a counter. One warp copies the keys and their values, those of the next tile while one
// is computed, and blocks of kBlockQ queries, of do and of the two numbers of each query into
// a ring, by tensor map. Each of the consumers, a warpgroup, owns 64 of the keys, and computes transposed scores, so
// that what it multiplies next is in its registers:
//
//   for each head that shares the keys, for each block of queries that sees them:
//     s = k q'        | while it waits, dk of the block before
//     t = v do'       | weights p of s
//     dv += p do      | ds = p * (t - delta)
//     dk += ds q
//
// Nothing is added in memory: results do not depend on who computes what when. Which queries
// see a tile of keys is what tile/key_range.cuh says with both in each other's place.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_operands.cuh"
#include "tile/attention_order.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/segment_map.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionKeysParams {
  const TensorMap *q, *k, *v, *d_out, *rows, *dk, *dv;  // see attention_sm90.cuh; of rows,
                                                        // (padded, 2 or 3, heads, batch)
  const float* everywhere;  // (batch, kv_heads, head_dim), or null: what all dv have more
  u32* counter;             // of tiles that were drawn; zero when the kernel starts
  const int* q_lengths;     // (batch), or null
  const int* kv_lengths;    // (batch), or null
  // Of segments, or null: (batch, padded_kv) ids, and spans (batch, tiles and blocks).
  const int* segments;
  const SegmentSpan *spans_kv, *spans_q;
  int batch, q_len, kv_len, kv_heads, padded_kv;
  int group;        // heads that share keys and values
  int left, right;  // of the window; not looked at if there is no limit
  int section;      // heads of keys, of all examples, of one section
  float scale;
  float cap_factor;  // scale / cap, if scores are capped
  float scale_log2;  // of what weights are powers: scale log2(e), or cap log2(e)
};

// What is known of each query of a block, aligned as copies need it.
template <class Traits>
struct alignas(128) AttentionKeysRows {
  float exponents[Traits::kBlockQ], deltas[Traits::kBlockQ];
  int segments[Traits::kSegments ? Traits::kBlockQ : 1];
};

template <class Traits>
struct AttentionKeysShared {
  static constexpr int kSlabs = Traits::kSlabs;
  alignas(1024) u8 k[2][kSlabs][Traits::kTileKv * 128];  // of this tile, and the next
  alignas(1024) u8 v[2][kSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 q[Traits::kStages][kSlabs][Traits::kBlockQ * 128];
  alignas(1024) u8 d_out[Traits::kStages][kSlabs][Traits::kBlockQ * 128];
  AttentionKeysRows<Traits> rows[Traits::kStages];
  u64 keys_full[2], keys_empty[2];
  u32 drawn[2];
  u32 counts[2];               // of blocks, of all heads, that see the tile
  u32 codes[Traits::kStages];  // of blocks, see BlockCode
  u64 q_full[Traits::kStages], d_out_full[Traits::kStages], empty[Traits::kStages];
  // Of blocks of queries, if there are segments; the producer's alone.
  SegmentMap<Traits::kSegments ? Traits::kMostBlocks : 32> map;
};

template <class Traits>
struct AttentionKeys {
  using Element = typename Traits::Element;
  using Shared = AttentionKeysShared<Traits>;
  using Scores = typename Traits::Scores;  // k q', v do'
  using Sums = typename Traits::Sums;      // p do, ds q
  using State = PipelineState<Traits::kStages>;
  using Interval = KeyInterval<Traits::kHasRight, Traits::kHasLeft>;  // queries of a key
  static constexpr int kTileKv = Traits::kTileKv, kBlockQ = Traits::kBlockQ;
  static constexpr int kHeadDim = Traits::kHeadDim, kStages = Traits::kStages;
  using TileKv = HeadTile<kTileKv, kHeadDim>;
  using TileQ = HeadTile<kBlockQ, kHeadDim>;
  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kSegments;

  static constexpr int kConsumers = kTileKv / 64;
  static constexpr int kSteps = kBlockQ / 16;
  static constexpr u32 kRowsBytes = (2 + Traits::kSegments) * kBlockQ * 4;
  // From the start of the keys.
  static constexpr u32 kUnitsToV = 2 * TileKv::kUnits, kUnitsToQ = 4 * TileKv::kUnits;
  static constexpr u32 kUnitsToDOut = kUnitsToQ + kStages * TileQ::kUnits;

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileKv % 64 == 0,
                "one producer warpgroup, and a consumer for 64 keys");
  static_assert(kBlockQ % 16 == 0 && kBlockQ <= 256, "queries in one box, steps of 16");
  static_assert(Scores::kN == kBlockQ && Sums::kN == kHeadDim, "one instruction a step");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::k) == 2 * TileKv::kBytes &&
                    sizeof(Shared::q) == kStages * TileQ::kBytes,
                "operands lie one after another");

  // A tile of keys.
  struct Work {
    AttentionTile tile;
    int limit;          // keys of the example
    Interval queries;   // that see a key
    BlockRange range;   // of blocks of them
  };

  const AttentionKeysParams& p;
  Shared& smem;

  // --- what both roles know ----------------------------------------------------------

  TRACEA_DEVICE u32 tiles() const {
    return static_cast<u32>(ceil_div(p.kv_len, kTileKv)) * p.kv_heads * p.batch;
  }

  // Of the last block of queries all are counted: their p are 0, see attention_rows.cuh.
  TRACEA_DEVICE Work work_at(u32 index) const {
    const AttentionOrder order{ceil_div(p.kv_len, kTileKv), p.kv_heads, p.batch, p.section,
                               false};
    const AttentionTile tile = order.at(index, kTileKv);
    const int limit =
        Traits::kKvLengths ? min(max(p.kv_lengths[tile.example], 0), p.kv_len) : p.kv_len;
    const int count =
        Traits::kQLengths ? min(max(p.q_lengths[tile.example], 0), p.q_len) : p.q_len;
    const Interval queries{p.q_len, round_up(count, kBlockQ), p.right, p.left};
    const int end = min(tile.query + kTileKv, limit);
    BlockRange range{0, 0, 0, 0};
    if (tile.query < end) range = queries.seen_blocks(tile.query, end - 1, kBlockQ);
    return {tile, limit, queries, range};
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&smem.keys_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.keys_empty[i]),
                      kConsumers * kWarpgroupSize / kWarpSize);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(shared_address(&smem.q_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.d_out_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty[i]), empty_arrivals(kConsumers, 1));
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  TRACEA_DEVICE static void wait(const u64& barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(shared_address(&barrier), parity)) {
    }
  }

  // --- producer: one warp, of which one thread copies --------------------------------

  TRACEA_DEVICE void produce() const {
    const bool copies = elect_one();
    State state;
    u32 index = blockIdx.x, count = 0;
    TRACEA_NO_UNROLL
    for (;; ++count) {
      const int stage = count % 2;
      wait(smem.keys_empty[stage], count / 2 % 2 ^ 1);
      if (index >= tiles()) break;
      const Work work = work_at(index);
      if constexpr (Traits::kSegments) {
        const AttentionTile& tile = work.tile;
        const SegmentSpan own =
            p.spans_kv[tile.example * ceil_div(p.kv_len, kTileKv) + tile.query / kTileKv];
        const i64 before = static_cast<i64>(tile.example) * ceil_div(p.q_len, kBlockQ);
        smem.map.fill(work.range, own, p.spans_q + before);
      }
      if (copies) produce_tile(work, index, stage, state);
      __syncwarp();
      if (threadIdx.x == 0) index = gridDim.x + atomicAdd(p.counter, 1u);
      index = static_cast<u32>(warp_uniform(static_cast<int>(index)));
    }
    // What ends the consumers' work.
    if (copies) {
      smem.drawn[count % 2] = index;
      mbarrier_arrive(shared_address(&smem.keys_full[count % 2]));
    }
  }

  TRACEA_DEVICE void produce_tile(const Work& work, u32 index, int stage,
                                  State& state) const {
    const AttentionTile& tile = work.tile;
    const u32 full = shared_address(&smem.keys_full[stage]);
    u32 left = static_cast<u32>(work.range.count() * p.group);
    if constexpr (Traits::kSegments) left = static_cast<u32>(smem.map.count * p.group);
    bool is_first = true;
    smem.drawn[stage] = index;
    smem.counts[stage] = left;
    if (left == 0) {
      mbarrier_arrive(full);
      return;
    }
    mbarrier_arrive_expect_tx(full, 2 * TileKv::kBytes);
    TileKv::copy(shared_address(smem.k[stage][0]), p.k, tile.query, tile.head, tile.example,
                 full);
    TileKv::copy(shared_address(smem.v[stage][0]), p.v, tile.query, tile.head, tile.example,
                 full);
    TRACEA_NO_UNROLL
    for (int head = tile.head * p.group; left > 0; ++head) {
      const auto copy = [&](int block, bool is_partial) {
        copy_queries(BlockCode::of(block, is_partial, is_first, --left == 0), head,
                     tile.example, state);
        is_first = false;
        state.advance();
      };
      if constexpr (Traits::kSegments) {
        smem.map.walk(work.range, copy);
      } else {
        walk_range(work.range, copy);
      }
    }
  }

  TRACEA_DEVICE void copy_queries(BlockCode code, int head, int example,
                                  const State& state) const {
    const int stage = state.stage_idx, block = code.block();
    wait(smem.empty[stage], state.producer_parity());
    smem.codes[stage] = code.word;
    const u32 q_full = shared_address(&smem.q_full[stage]);
    mbarrier_arrive_expect_tx(q_full, TileQ::kBytes + kRowsBytes);
    TileQ::copy(shared_address(smem.q[stage][0]), p.q, block * kBlockQ, head, example, q_full);
    cp_async_bulk_tensor_4d(shared_address(smem.rows[stage].exponents), p.rows, block * kBlockQ, 0,
                            head, example, q_full);
    const u32 d_out_full = shared_address(&smem.d_out_full[stage]);
    mbarrier_arrive_expect_tx(d_out_full, TileQ::kBytes);
    TileQ::copy(shared_address(smem.d_out[stage][0]), p.d_out, block * kBlockQ, head,
                example, d_out_full);
  }

  // --- consumers: warpgroups ---------------------------------------------------------

  struct Progress {
    float dk[Sums::kAccumulators], dv[Sums::kAccumulators];
    State state;
    int ids[2];  // segments of the thread's two keys
  };

  // p of the consumer's keys and a block of queries, from their scores, and rounded. If
  // scores are capped, p stays times the derivative of that.
  template <bool kMasks>
  TRACEA_DEVICE void weigh(float (&s)[Scores::kAccumulators], u32 (&rounded)[kSteps][4],
                           const Interval& queries, const int (&ids)[2], int block, int key,
                           int stage, int thread) const {
    const int column = wgmma_accumulator_col(thread, 0);
    const u32 exponents = shared_address(smem.rows[stage].exponents) + 4 * column;
    if constexpr (Traits::kCaps) soft_cap(s, p.cap_factor);
    int begin[2], end[2];
    if constexpr (kMasks) {
      const int first = block * kBlockQ + column;
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = key + wgmma_accumulator_row(thread, 2 * half);
        begin[half] = queries.begin(row) - first;
        end[half] = queries.end(row) - first;
      }
    }
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      const Pair exponent = ld_shared_pair(exponents + 32 * j);
      u32 segments[2] = {};
      if constexpr (kMasks && Traits::kSegments) {
        ld_shared(exponents + 2 * 4 * kBlockQ + 32 * j, segments[0], segments[1]);
      }
      float c[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float shift = i % 2 ? exponent.y : exponent.x;
        c[i] = ex2_approx(fmaf(s[4 * j + i], p.scale_log2, -shift));
        if constexpr (kMasks) {
          const int q = 8 * j + i % 2;
          const bool is_seen =
              (!Traits::kHasRight || q >= begin[i / 2]) &&
              (!Traits::kHasLeft || q < end[i / 2]) &&
              (!Traits::kSegments || static_cast<int>(segments[i % 2]) == ids[i / 2]);
          c[i] = is_seen ? c[i] : 0.0f;
        }
        float& score = s[4 * j + i];
        score = Traits::kCaps ? c[i] * fmaf(-score, score, 1.0f) : c[i];
      }
      round_block<Element>(rounded, j, c);
    }
  }

  // ds = p * (t - delta), rounded.
  TRACEA_DEVICE void differentiate(const float (&p_of)[Scores::kAccumulators],
                                   const float (&t)[Scores::kAccumulators],
                                   u32 (&rounded)[kSteps][4], int stage, int thread) const {
    const u32 deltas =
        shared_address(smem.rows[stage].deltas) + 4 * wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int j = 0; j < kBlockQ / 8; ++j) {
      const Pair delta = ld_shared_pair(deltas + 32 * j);
      float c[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c[i] = p_of[4 * j + i] * (t[4 * j + i] - (i % 2 ? delta.y : delta.x));
      }
      round_block<Element>(rounded, j, c);
    }
  }

  // One block of queries of one head; whether it is the last. Its last products are not
  // waited for.
  TRACEA_DEVICE bool step(Progress& at, u32 start, u32 k, const Interval& queries, int key,
                          int thread) const {
    float s[Scores::kAccumulators], t[Scores::kAccumulators];
    u32 weights[kSteps][4], ds[kSteps][4];
    const int stage = at.state.stage_idx;
    const u32 v = k + kUnitsToV;
    const u32 q = start + kUnitsToQ + stage * TileQ::kUnits;
    const u32 d_out = start + kUnitsToDOut + stage * TileQ::kUnits;
    wait(smem.q_full[stage], at.state.consumer_parity());
    const BlockCode code{uniform_word(&smem.codes[stage])};
    wgmma_fence();
    multiply_columns<Scores, TileKv, TileQ>(s, k, q);
    // The products of the block before are done, and their operands' registers are free.
    wgmma_wait_group<1>();
    if (!code.is_first()) release(thread, stage);
    wait(smem.d_out_full[stage], at.state.consumer_parity());
    multiply_columns<Scores, TileKv, TileQ>(t, v, d_out);
    wgmma_wait_group<1>();
    wgmma_fence_operands(s);
    if (kHasPartial && code.is_partial()) {
      weigh<true>(s, weights, queries, at.ids, code.block(), key, stage, thread);
    } else {
      weigh<false>(s, weights, queries, at.ids, code.block(), key, stage, thread);
    }
    wgmma_fence();
    multiply_rows<Sums, TileQ>(at.dv, weights, d_out);
    wgmma_wait_group<1>();
    wgmma_fence_operands(t);
    differentiate(s, t, ds, stage, thread);
    wgmma_fence();
    multiply_rows<Sums, TileQ>(at.dk, ds, q);
    at.state.advance();
    return code.is_last();
  }

  TRACEA_DEVICE void consume(int consumer) const {
    Progress at;
    TRACEA_NO_UNROLL
    for (u32 count = 0;; ++count) {
      const int stage = count % 2;
      wait(smem.keys_full[stage], count / 2 % 2);
      if (drawn(stage) >= tiles()) break;
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) at.dk[i] = at.dv[i] = 0.0f;
      // Anew each time, as there are too few registers to keep what follows from it.
      sum(at, work_at(drawn(stage)), stage, consumer, thread_anew());
      finish(at, work_at(drawn(stage)), stage, consumer, thread_anew());
    }
  }

  TRACEA_DEVICE static int thread_anew() {
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));
    return thread % kWarpgroupSize;
  }

  TRACEA_DEVICE static u32 uniform_word(const u32* word) {
    u32 value;
    ld_shared(shared_address(word), value);
    return static_cast<u32>(warp_uniform(static_cast<int>(value)));
  }

  // The tile that lies in this stage.
  TRACEA_DEVICE u32 drawn(int stage) const { return uniform_word(&smem.drawn[stage]); }

  // Of all blocks of queries of all heads.
  TRACEA_DEVICE void sum(Progress& at, const Work& work, int stage, int consumer,
                         int thread) const {
    if (uniform_word(&smem.counts[stage]) == 0) return;
    const int key = work.tile.query + consumer * 64;
    const u32 start = shared_address(smem.k[0][0]) / 16;
    const u32 k = start + stage * TileKv::kUnits + consumer * kConsumerUnits;
    if constexpr (Traits::kSegments) {
      const int* const ids = p.segments + static_cast<i64>(work.tile.example) * p.padded_kv;
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        at.ids[half] = ids[min(key + wgmma_accumulator_row(thread, 2 * half), p.kv_len - 1)];
      }
    }
    TRACEA_NO_UNROLL
    while (!step(at, start, k, work.queries, key, thread)) {
    }
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.dk);
    wgmma_fence_operands(at.dv);
    release(thread, at.state.stage_idx);
  }

  // The stage before this one.
  TRACEA_DEVICE void release(int thread, int stage) const {
    if (thread == 0) {
      mbarrier_arrive(shared_address(&smem.empty[stage == 0 ? kStages - 1 : stage - 1]));
    }
  }

  // Stores the consumer's rows, staged where its keys and values were.
  TRACEA_DEVICE void finish(Progress& at, const Work& work, int stage, int consumer,
                            int thread) const {
    const AttentionTile& tile = work.tile;
    const int key = tile.query + consumer * 64;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const bool is_key = key + wgmma_accumulator_row(thread, 2 * half) < work.limit;
      TRACEA_UNROLL
      for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
        TRACEA_UNROLL
        for (int j = i; j < i + 2; ++j) {
          at.dk[j] = is_key ? at.dk[j] * p.scale : 0.0f;
          at.dv[j] = is_key ? at.dv[j] : 0.0f;
        }
      }
    }
    if constexpr (Traits::kEverywhere) add_everywhere(at.dv, tile, thread);
    meet_warpgroup(consumer);  // all of it have multiplied their keys and values
    const u32 to_dk = shared_address(smem.k[stage][0]) + consumer * 64 * 128;
    const u32 to_dv = shared_address(smem.v[stage][0]) + consumer * 64 * 128;
    stage_rows<Element, typename Traits::Swizzle, TileKv>(at.dk, to_dk, thread);
    stage_rows<Element, typename Traits::Swizzle, TileKv>(at.dv, to_dv, thread);
    fence_proxy_async_shared();
    __syncwarp();
    if (!elect_one()) return;
    const int row = thread / kWarpSize * 16;
    store_rows<TileKv>(p.dk, to_dk + row * 128, key + row, tile.head, tile.example);
    store_rows<TileKv>(p.dv, to_dv + row * 128, key + row, tile.head, tile.example);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
    mbarrier_arrive(shared_address(&smem.keys_empty[stage]));
  }

  // What queries that see no key, and take the mean of all values, add to every dv.
  TRACEA_DEVICE void add_everywhere(float (&dv)[Sums::kAccumulators],
                                    const AttentionTile& tile, int thread) const {
    const float* const row =
        p.everywhere + (static_cast<i64>(tile.example) * p.kv_heads + tile.head) * kHeadDim;
    TRACEA_UNROLL
    for (int block = 0; block < kHeadDim / 8; ++block) {
      const int column = wgmma_accumulator_col(thread, 4 * block);
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) dv[4 * block + i] += row[column + i % 2];
    }
  }
};

template <class Traits>
TRACEA_DEVICE void attention_backward_keys_sm90(const AttentionKeysParams& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  using Kernel = AttentionKeys<Traits>;
  const Kernel kernel{p, *reinterpret_cast<typename Kernel::Shared*>(smem_bytes)};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  kernel.initialize();
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (warp == 0) kernel.produce();
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace tracea
