// attention_sm90: o = softmax(scale q k' , where allowed) v for each head, on Hopper.
//
// A block computes tiles of kTileQ queries of one head, one after another. One warp copies
// queries, and blocks of kTileKv keys and values into two rings, by tensor map. Each of the
// consumers, a warpgroup, owns 64 of the queries:
//
//   for each block of keys, the last first:
//     s = q k'          (tensor cores, q and k from shared memory)
//     p = softmax step of s, rounded to the operands' dtype
//     o = alpha o + p v (tensor cores, p from registers, v from shared memory)
//
// Within a consumer (kOverlaps) the product p v of one block runs during the softmax of the
// next:
//
//   issue s' = q k'[n-1] | issue o += p v[n] | s' done: softmax of s' | o done: o *= alpha
//
// Between consumers (kPingPong) a turn goes round: who has it issues its two products, and
// passes it on before its softmax. While one is at its softmax, the other multiplies.
//
// Which blocks a tile sees follows from positions and lengths, see tile/key_range.cuh, and
// (kMapped) from a map of segments and masks, see tile/block_map.cuh: both roles compute it
// from the same numbers. A tile past its example's queries sees none, and is zeros.
//
// A query that sees no key takes the mean of all values. With a map nobody knows until the
// end which queries do: then they read all values.
//
// With a bias s starts as bias / scale, and so it does with ALiBi's, which is computed. With a cap s becomes tanh(scale s / cap), which
// softmax scales with the cap. A sink is a weight more in the rows' totals.
//
// A block takes tile blockIdx.x of the order of tiles, and the next ones gridDim.x further
// on, or (kDraws) the next that no block has drawn, from a counter that is zero when the
// kernel starts. Results do not depend on who computes a tile.
//
// Sums are divided by the rows' totals at the end: until then they may be 2^kSlack kv_len
// times as large as the values, and overflow where those are almost the largest f32.
//
// A head is kHeadDim columns of queries and keys, kValueDim of values, in slabs of 64: 128
// swizzled bytes a row. What the last slab has more is read as zeros. PTX ISA: "wgmma.mma_async",
// "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_order.cuh"
#include "tile/block_map.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/key_range.cuh"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"
#include "tile/score_bias.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionSm90Params {
  const TensorMap *q, *k, *v, *o;  // (columns, length, heads, batch), innermost first
  float* lse;                      // (batch, heads, q_len); null unless it is saved
  u32* counter;                    // null unless tiles are drawn
  const int* q_lengths;            // (batch), or null
  const int* kv_lengths;           // (batch), or null
  const int* q_segments;           // (batch, q_len), or null
  const int* kv_segments;          // (batch, kv_len), or null
  const float* sinks;              // (heads), or null
  const float* alibi_slopes;       // (heads), or null
  const void* bias;                // (1 or batch, 1 or heads, 1 or q_len, 1 or kv_len)
  const u32* map;                  // (1 or batch, 1 or heads, tiles, words), or null
  const u32* mask;                 // (1 or batch, 1 or heads, 1 or q_len, blocks, 4)
  const void* values;              // those of v
  int batch, q_len, kv_len, heads;
  int group;                       // heads that share keys and values
  int left, right;                 // of the window; not looked at if there is no limit
  int ahead;                       // the key where the first query stands
  int section;                     // heads, of all examples, of one section
  int map_example, map_head;       // words from one to the next, 0 if they share
  int bias_row, mask_row;          // elements, likewise
  i64 bias_example, bias_head, mask_example, mask_head;
  float scale_log2;                // scale log2(e), or cap log2(e)
  float unscale;                   // 1 / scale
  float to_cap;                    // scale / cap
};

// What a producer says of a tile that it hands to consumers.
// What ALiBi adds to a score: nothing, slope (key - query) or -slope |key - query|.
enum class Alibi { kNone, kLinear, kDistance };

enum class TileKind : u32 { kBlind, kSees, kNone };

template <class Traits>
struct AttentionSm90Shared {
  static constexpr int kSlabs = Traits::kSlabs, kValueSlabs = Traits::kValueSlabs;
  alignas(1024) u8 q[kSlabs][Traits::kTileQ * 128];
  alignas(1024) u8 k[Traits::kStages][kSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 v[Traits::kStages][kValueSlabs][Traits::kTileKv * 128];
  // Of the result, if it does not take the place of the queries.
  alignas(1024) u8 staging[Traits::kStagesInPlace ? 1
                                                  : kValueSlabs * Traits::kTileQ * 128];
  u64 q_full, q_empty;
  u64 k_full[Traits::kStages], k_empty[Traits::kStages];
  u64 v_full[Traits::kStages], v_empty[Traits::kStages];
  u64 drawn_full[2], drawn_empty[2];
  u32 drawn[2];
  u32 seen[Traits::kStages];  // SeenBlock of the keys
  AttentionTile tile[2];      // this one and the next, which comes while this is stored
  TileKind kind[2];
};

template <class Traits>
struct AttentionSm90 {
  using Shared = AttentionSm90Shared<Traits>;
  using Scores = typename Traits::Scores;  // q k'
  using Sums = typename Traits::Sums;      // p v
  using State = PipelineState<Traits::kStages>;
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;
  using DescriptorQ = OperandDescriptor<false, 0>;
  using DescriptorK = OperandDescriptor<false, 0>;
  using DescriptorV = OperandDescriptor<true, Traits::kTileKv * 128>;

  static constexpr int kTileQ = Traits::kTileQ, kTileKv = Traits::kTileKv;
  static constexpr int kHeadDim = Traits::kHeadDim, kSlabs = Traits::kSlabs;
  static constexpr int kValueDim = Traits::kValueDim, kValueSlabs = Traits::kValueSlabs;
  static constexpr int kConsumers = kTileQ / 64;
  static constexpr int kWarps = kConsumers * kWarpgroupSize / kWarpSize;
  static constexpr int kStepsScores = ceil_div(kHeadDim, 16);  // of 16 of the head
  static constexpr int kStepsSums = kTileKv / 16;              // of 16 keys
  static constexpr u32 kSlabBytesQ = kTileQ * 128, kSlabBytesKv = kTileKv * 128;
  static constexpr int kBlocks = kValueDim / 8;  // of 8 columns of o
  // Distances in a descriptor's unit of 16 bytes, from the start of the queries.
  static constexpr u32 kUnitsToKeys = kSlabs * kSlabBytesQ / 16;
  static constexpr u32 kStageUnits = kSlabs * kSlabBytesKv / 16;
  static constexpr u32 kValueStageUnits = kValueSlabs * kSlabBytesKv / 16;
  static constexpr u32 kUnitsToValues = kUnitsToKeys + Traits::kStages * kStageUnits;
  // Whether the consumers wait for the queries of a tile that sees no block: in their place
  // they stage zeros, and with a map they do not know.
  static constexpr bool kAnnouncesBlind = Traits::kStagesInPlace || Traits::kMapped;
  // Whether the product of queries and keys is added to something.
  static constexpr bool kStarts = Traits::kBiased || Traits::kAlibi != Alibi::kNone;
  // Whether more blocks than a tile's first may be partial.
  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kKvLengths;

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileQ % 64 == 0,
                "one producer warpgroup, and a consumer for 64 queries");
  static_assert(kHeadDim % 8 == 0 && kSlabs == ceil_div(kHeadDim, 64), "slabs of 64");
  static_assert(kValueDim % 8 == 0 && kValueSlabs == ceil_div(kValueDim, 64), "slabs");
  static_assert(!Traits::kStagesInPlace || kValueSlabs <= kSlabs,
                "results fit where the queries were");
  static_assert(!Traits::kMaskBits || kTileKv <= 128, "a word of mask for a row of a thread");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256, "keys in one box, steps of 16");
  static_assert(Scores::kN == kTileKv && Sums::kN == kValueDim, "one instruction a step");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::q) == kUnitsToKeys * 16 &&
                    sizeof(Shared::k) == (kUnitsToValues - kUnitsToKeys) * 16,
                "operands lie one after another");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every stage starts free");
  static_assert(!Traits::kPingPong || kConsumers > 1, "a turn needs somebody to go to");
  static_assert(kConsumers <= 3, "named barriers");

  const AttentionSm90Params& p;
  Shared& smem;

  TRACEA_DEVICE AttentionTile tile_at(u32 index) const {
    const AttentionOrder order{ceil_div(p.q_len, kTileQ), anew(p.heads), p.batch,
                               anew(p.section), Traits::kHasRight};
    return order.at(index, kTileQ);
  }

  TRACEA_DEVICE u32 tiles() const {
    return static_cast<u32>(ceil_div(p.q_len, kTileQ)) * p.heads * p.batch;
  }

  // The value, in a register of its own: what is computed from it is computed here, and not
  // carried through the loop over tiles in registers that there are too few of.
  TRACEA_DEVICE static int anew(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  using Walk = typename Choose<Traits::kMapped, MapWalk, RangeWalk>::Type;
  using Bias = BiasRow<typename Traits::BiasElement, Traits::kBiasPairs>;

  // What the scores of a consumer's rows depend on, beside queries and keys. Where ids,
  // masks and biases lie is computed anew for each block: registers are too few to keep it.
  struct Rules {
    Interval keys;
    AttentionTile tile;
    int query;  // the consumer's first
  };

  // --- what both roles know of a tile ------------------------------------------------

  TRACEA_DEVICE int queries(const AttentionTile& tile) const {
    return Traits::kQLengths ? min(max(p.q_lengths[tile.example], 0), p.q_len) : p.q_len;
  }

  // The key where the first query stands.
  TRACEA_DEVICE int ahead(const AttentionTile& tile) const {
    return Traits::kFromEnd ? limit(tile) - queries(tile) : p.ahead;
  }

  TRACEA_DEVICE int limit(const AttentionTile& tile) const {
    return Traits::kKvLengths ? min(max(p.kv_lengths[tile.example], 0), p.kv_len) : p.kv_len;
  }

  TRACEA_DEVICE Interval interval(const AttentionTile& tile) const {
    const int keys = limit(tile);
    if constexpr (Traits::kFromEnd) {
      const int ahead = keys - queries(tile);
      return {p.kv_len, keys, p.left - ahead, p.right + ahead};
    }
    return {p.kv_len, keys, p.left, p.right};
  }

  TRACEA_DEVICE BlockRange blocks(const AttentionTile& tile, const Interval& keys) const {
    const int count = queries(tile);
    if (tile.query >= count) return {0, 0, 0, 0};
    const int last = min(tile.query + kTileQ, count) - 1;
    if constexpr (Traits::kMapped) return keys.seen_blocks(tile.query, last, kTileKv);
    return keys.blocks(tile.query, last, kTileKv);
  }

  // The words of a tile in the map.
  TRACEA_DEVICE const u32* map_of(const AttentionTile& tile) const {
    if constexpr (!Traits::kMapped) return nullptr;
    const int words = 2 * ceil_div(ceil_div(p.kv_len, kTileKv), 32);
    return p.map + tile.example * p.map_example + tile.head * p.map_head +
           tile.query / kTileQ * words;
  }

  // --- barriers ----------------------------------------------------------------------

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      mbarrier_init(shared_address(&smem.q_full), full_arrivals());
      mbarrier_init(shared_address(&smem.q_empty), kWarps);
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.k_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.v_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.k_empty[i]), empty_arrivals(kConsumers, 1));
        mbarrier_init(shared_address(&smem.v_empty[i]), empty_arrivals(kConsumers, 1));
      }
      TRACEA_UNROLL
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&smem.drawn_full[i]), 1);
        mbarrier_init(shared_address(&smem.drawn_empty[i]), kWarps);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  TRACEA_DEVICE static void wait(const u64& barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(shared_address(&barrier), parity)) {
    }
  }

  TRACEA_DEVICE static void arrive_if(bool is_one, const u64& barrier) {
    if (is_one) mbarrier_arrive(shared_address(&barrier));
  }

  // --- producer: one thread ----------------------------------------------------------

  TRACEA_DEVICE void produce() const {
    State keys, values;
    PipelineState<1> queries_state;
    PipelineState<2> draw;
    u32 index = blockIdx.x;
    TRACEA_NO_UNROLL
    while (true) {
      u32 next = index + gridDim.x;
      if constexpr (Traits::kDraws) {
        if constexpr (!Traits::kMapped) {
          wait(smem.drawn_empty[draw.stage_idx], draw.producer_parity());
          st_shared(shared_address(&smem.drawn[draw.stage_idx]), index);
          mbarrier_arrive(shared_address(&smem.drawn_full[draw.stage_idx]));
          draw.advance();
        }
        if (index < tiles()) next = gridDim.x + atomicAdd(p.counter, 1u);
      }
      if (index >= tiles()) break;
      const AttentionTile tile = tile_at(index);
      const BlockRange range = blocks(tile, interval(tile));
      Walk walk(map_of(tile), range);
      if (walk.next()) {
        produce_tile(tile, walk, keys, values, queries_state);
      } else if constexpr (kAnnouncesBlind) {
        hand_over(tile, TileKind::kBlind, queries_state);
        mbarrier_arrive(shared_address(&smem.q_full));
      }
      index = next;
    }
    if constexpr (Traits::kMapped) {
      hand_over({0, 0, 0}, TileKind::kNone, queries_state);
      mbarrier_arrive(shared_address(&smem.q_full));
    }
  }

  // With a map consumers learn from the producer what tile is next: they have no registers
  // to find out. Queries may be copied when it returns.
  TRACEA_DEVICE void hand_over(const AttentionTile& tile, TileKind kind,
                               PipelineState<1>& state) const {
    wait(smem.q_empty, state.producer_parity());
    if constexpr (Traits::kMapped) {
      const u32 parity = state.consumer_parity(), to = shared_address(&smem.tile[parity]);
      st_shared(to, static_cast<u32>(tile.query));
      st_shared(to + 4, static_cast<u32>(tile.head));
      st_shared(to + 8, static_cast<u32>(tile.example));
      st_shared(shared_address(&smem.kind[parity]), static_cast<u32>(kind));
    }
    state.advance();
  }

  // The walk stands at the tile's first block.
  TRACEA_DEVICE void produce_tile(const AttentionTile& tile, Walk& walk, State& keys,
                                  State& values, PipelineState<1>& queries_state) const {
    const int kv_head = tile.head / anew(p.group);
    int block = walk.block();
    bool has_more = copy_keys(walk, kv_head, tile.example, keys);
    hand_over(tile, TileKind::kSees, queries_state);
    const u32 full = shared_address(&smem.q_full);
    mbarrier_arrive_expect_tx(full, kSlabs * kSlabBytesQ);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(smem.q[slab]), p.q, slab * 64, tile.query,
                              tile.head, tile.example, full);
    }
    TRACEA_NO_UNROLL
    while (has_more) {
      const int next = walk.block();
      has_more = copy_keys(walk, kv_head, tile.example, keys);
      copy_values(block, kv_head, tile.example, values);
      block = next;
    }
    copy_values(block, kv_head, tile.example, values);
  }

  // Copies the keys of the block that the walk stands at, and goes to the next.
  TRACEA_DEVICE bool copy_keys(Walk& walk, int head, int example, State& state) const {
    const int stage = state.stage_idx, block = walk.block();
    const bool is_mixed = walk.is_mixed(), is_full = walk.is_full();
    const bool has_more = walk.next();
    wait(smem.k_empty[stage], state.producer_parity());
    state.advance();
    if constexpr (Traits::kMapped) {
      const int code = SeenBlock::of(block, is_mixed, is_full, !has_more).code;
      st_shared(shared_address(&smem.seen[stage]), static_cast<u32>(code));
    }
    copy_block<kSlabs>(smem.k[stage][0], p.k, block, head, example,
                       smem.k_full[stage]);
    return has_more;
  }

  TRACEA_DEVICE void copy_values(int block, int head, int example, State& state) const {
    const int stage = state.stage_idx;
    wait(smem.v_empty[stage], state.producer_parity());
    state.advance();
    copy_block<kValueSlabs>(smem.v[stage][0], p.v, block, head, example,
                            smem.v_full[stage]);
  }

  template <int kCount>
  TRACEA_DEVICE static void copy_block(const u8* to, const TensorMap* map, int block,
                                       int head, int example, const u64& barrier) {
    const u32 full = shared_address(&barrier);
    mbarrier_arrive_expect_tx(full, kCount * kSlabBytesKv);
    TRACEA_UNROLL
    for (int slab = 0; slab < kCount; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(to) + slab * kSlabBytesKv, map, slab * 64,
                              block * kTileKv, head, example, full);
    }
  }

  // --- consumers: warpgroups ---------------------------------------------------------

  // What the tensor cores read `units` of 16 bytes into shared memory. One number is kept
  // for all operands: what else a descriptor says is constant.
  template <class Descriptor>
  TRACEA_DEVICE static u64 descriptor(u32 units) {
    constexpr u64 kRest = Descriptor::encode(0);
    return (kRest & ~u64{0xFFFFFFFFu}) | (static_cast<u32>(kRest) + units);
  }

  // s = q k' of one block, added to a bias, not waited for. `start`: of shared memory, in
  // units of 16 bytes.
  TRACEA_DEVICE static void multiply_keys(float (&s)[Scores::kAccumulators], u32 start,
                                          int consumer, int stage) {
    const u32 q = start + consumer * (64 * 128 / 16);
    const u32 k = start + kUnitsToKeys + stage * kStageUnits;
    TRACEA_UNROLL
    for (int step = 0; step < kStepsScores; ++step) {
      const int slab = step / 4, in_slab = step % 4;
      const u32 q_units = slab * (kSlabBytesQ / 16) + in_slab * DescriptorQ::kStep;
      const u32 k_units = slab * (kSlabBytesKv / 16) + in_slab * DescriptorK::kStep;
      Scores::mma(s, descriptor<DescriptorQ>(q + q_units),
                  descriptor<DescriptorK>(k + k_units), kStarts || step != 0);
    }
    wgmma_commit_group();
  }

  // o += weights v of one block, not waited for.
  TRACEA_DEVICE static void multiply_values(float (&o)[Sums::kAccumulators],
                                            const u32 (&weights)[kStepsSums][4], u32 start,
                                            int stage) {
    const u32 v = start + kUnitsToValues + stage * kValueStageUnits;
    TRACEA_UNROLL
    for (int step = 0; step < kStepsSums; ++step) {
      Sums::mma(o, weights[step], descriptor<DescriptorV>(v + step * DescriptorV::kStep),
                true);
    }
    wgmma_commit_group();
  }

  // The accumulators of two neighbouring blocks of 8 columns are a fragment of 16.
  TRACEA_DEVICE static void round_to_weights(const float (&s)[Scores::kAccumulators],
                                  u32 (&weights)[kStepsSums][4]) {
    TRACEA_UNROLL
    for (int step = 0; step < kStepsSums; ++step) {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int first = 8 * step + 2 * i;
        weights[step][i] =
            Packed<typename Traits::Element>::from({s[first], s[first + 1]}).bits;
      }
    }
  }

  // Scores of keys that a query must not see, and of keys that do not exist.
  TRACEA_DEVICE void mask(float (&s)[Scores::kAccumulators], int block,
                          const Rules& rules, bool is_mixed, int thread) const {
    const Interval& keys = rules.keys;
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    const int stored = p.kv_len - first;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = rules.query + wgmma_accumulator_row(thread, 2 * half);
      const int begin = keys.begin(row) - first, end = keys.end(row) - first;
      TRACEA_UNROLL
      for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int column = 8 * (i / 4) + j;
          const bool is_seen = column < end && (!Traits::kHasLeft || column >= begin);
          const float unseen = column < stored ? kMasked : kNoKey;
          s[i + j] = is_seen ? s[i + j] : unseen;
        }
      }
    }
    if (!is_mixed) return;
    if constexpr (Traits::kSegments) mask_segments(s, rules, first, stored, thread);
    if constexpr (Traits::kMaskBits) mask_bits(s, rules, block, thread);
  }

  // The query of a thread's row. Rows behind the last query look at that: nobody looks at
  // them.
  TRACEA_DEVICE i64 query_of(const Rules& rules, int thread, int half) const {
    return min(rules.query + wgmma_accumulator_row(thread, 2 * half), p.q_len - 1);
  }

  // Scores of keys of other segments. Those of keys that do not exist stay.
  TRACEA_DEVICE void mask_segments(float (&s)[Scores::kAccumulators], const Rules& rules,
                                   int first, int stored, int thread) const {
    const i64 example = rules.tile.example;
    const int* segments = p.kv_segments + example * p.kv_len + first;
    int own[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      own[half] = p.q_segments[example * p.q_len + query_of(rules, thread, half)];
    }
    TRACEA_UNROLL
    for (int i = 0; i < Scores::kAccumulators; i += 4) {
      TRACEA_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int column = 8 * (i / 4) + j;
        if (column >= stored) continue;
        const int segment = segments[column];
        s[i + j] = segment == own[0] ? s[i + j] : kMasked;
        s[i + 2 + j] = segment == own[1] ? s[i + 2 + j] : kMasked;
      }
    }
  }

  // A word has a bit for each of a thread's keys of a block in one row.
  TRACEA_DEVICE void mask_bits(float (&s)[Scores::kAccumulators], const Rules& rules,
                               int block, int thread) const {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const u32* words = p.mask + rules.tile.example * p.mask_example +
                         rules.tile.head * p.mask_head +
                         query_of(rules, thread, half) * p.mask_row;
      const u32 word = words[4 * block + thread % 4];
      TRACEA_UNROLL
      for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          s[i + j] = word >> (i / 4 * 2 + j) & 1u ? s[i + j] : kMasked;
        }
      }
    }
  }

  // What the product of queries and keys is added to. kChecks: whether the block may have
  // keys that do not exist.
  template <bool kChecks>
  TRACEA_DEVICE void start_scores(float (&s)[Scores::kAccumulators], int block,
                                  const Rules& rules, int thread) const {
    if constexpr (Traits::kBiased) start_biased<kChecks>(s, block, rules, thread);
    if constexpr (Traits::kAlibi != Alibi::kNone) start_alibi(s, block, rules, thread);
  }

  TRACEA_DEVICE void start_alibi(float (&s)[Scores::kAccumulators], int block,
                                 const Rules& rules, int thread) const {
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    const float slope = p.alibi_slopes[rules.tile.head] * p.unscale;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = rules.query + wgmma_accumulator_row(thread, 2 * half);
      const float start = static_cast<float>(first - row - ahead(rules.tile));
      TRACEA_UNROLL
      for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float further = static_cast<float>(8 * (i / 4) + j);
          const float bias = Traits::kAlibi == Alibi::kLinear
                                 ? fmaf(slope, further, slope * start)
                                 : -slope * fabsf(start + further);
          s[i + j] = Traits::kBiased ? s[i + j] + bias : bias;
        }
      }
    }
  }

  template <bool kChecks>
  TRACEA_DEVICE void start_biased(float (&s)[Scores::kAccumulators], int block,
                                  const Rules& rules, int thread) const {
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Bias row{static_cast<const typename Traits::BiasElement*>(p.bias) +
                     rules.tile.example * p.bias_example + rules.tile.head * p.bias_head +
                     query_of(rules, thread, half) * p.bias_row};
      Pair bias{0.0f, 0.0f};
      if constexpr (!Traits::kBiasKeys) bias.x = bias.y = row.one();
      TRACEA_UNROLL
      for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
        const int column = 8 * (i / 4);
        if constexpr (Traits::kBiasKeys) {
          bias = kChecks ? row.two_inside(first + column, p.kv_len)
                         : row.two(first + column, first + column + 1);
        }
        s[i] = unscaled_bias(bias.x, p.unscale);
        s[i + 1] = unscaled_bias(bias.y, p.unscale);
      }
    }
  }

  // Scores as softmax takes them.
  template <bool kMasks, class RulesOf>
  TRACEA_DEVICE void finish_scores(float (&s)[Scores::kAccumulators], int block,
                                   bool is_mixed, const RulesOf& rules,
                                   int thread) const {
    if constexpr (Traits::kSoftCap) soft_cap(s, p.to_cap);
    if constexpr (kMasks) mask(s, block, rules(), is_mixed, thread);
  }

  // What a consumer keeps from block to block of a tile.
  struct Progress {
    float o[Sums::kAccumulators];
    u32 weights[kStepsSums][4];  // of the block before, not yet multiplied
    State keys, values;
  };

  // Multiplies the queries and a block of keys, and the block before's weights and values.
  // `rules` returns them.
  template <bool kMasks, class RulesOf>
  TRACEA_DEVICE void step(Progress& at, OnlineSoftmax& softmax, int block, u32 start,
                          const RulesOf& rules, int consumer, int thread) const {
    float s[Scores::kAccumulators], alpha[2];
    if constexpr (kStarts) start_scores<kMasks>(s, block, rules(), thread);
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    if constexpr (Traits::kPingPong) await_turn(consumer);
    wgmma_fence();
    multiply_keys(s, start, consumer, at.keys.stage_idx);
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    multiply_values(at.o, at.weights, start, at.values.stage_idx);
    if constexpr (Traits::kPingPong) grant_turn((consumer + 1) % kConsumers);
    wgmma_wait_group<1>();
    wgmma_fence_operands(s);
    arrive_if(thread == 0, smem.k_empty[at.keys.stage_idx]);
    at.keys.advance();
    bool is_same;
    if constexpr (Traits::kSoftCap && !kMasks) {
      is_same = softmax.update_capped(s, alpha, SoftCap{p.to_cap});
    } else {
      finish_scores<kMasks>(s, block, true, rules, thread);
      is_same = softmax.update(s, alpha);
    }
    if constexpr (Traits::kOverlaps) softmax.settle();
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.o);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.values.advance();
    if (!is_same) {
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] *= alpha[i / 2 % 2];
    }
    round_to_weights(s, at.weights);
  }

  // The first block of a tile: there are no weights yet.
  template <class RulesOf>
  TRACEA_DEVICE void begin(Progress& at, OnlineSoftmax& softmax, int block, bool is_mixed,
                           u32 start, const RulesOf& rules, int consumer,
                           int thread) const {
    float s[Scores::kAccumulators], alpha[2];
    if constexpr (kStarts) start_scores<true>(s, block, rules(), thread);
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    wgmma_fence();
    multiply_keys(s, start, consumer, at.keys.stage_idx);
    wgmma_wait_group<0>();
    wgmma_fence_operands(s);
    arrive_if(thread == 0, smem.k_empty[at.keys.stage_idx]);
    at.keys.advance();
    finish_scores<true>(s, block, is_mixed, rules, thread);
    softmax.update(s, alpha);
    round_to_weights(s, at.weights);
  }

  // The last weights of a tile meet their values.
  TRACEA_DEVICE void end(Progress& at, u32 start, int thread) const {
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    wgmma_fence();
    multiply_values(at.o, at.weights, start, at.values.stage_idx);
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.o);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.values.advance();
  }

  // The block whose keys come next.
  TRACEA_DEVICE SeenBlock seen_block(const State& keys) const {
    wait(smem.k_full[keys.stage_idx], keys.consumer_parity());
    u32 code;
    ld_shared(shared_address(&smem.seen[keys.stage_idx]), code);
    return {static_cast<int>(code)};
  }

  // What holds for all lanes, or for none: told so, the compiler does not let products wait
  // for each other, as it does where lanes may part.
  TRACEA_DEVICE static bool any_lane(bool holds) { return __any_sync(0xFFFFFFFFu, holds); }

  TRACEA_DEVICE AttentionTile handed_over(u32 parity) const {
    const u32 from = shared_address(&smem.tile[parity]);
    u32 query, head, example;
    ld_shared(from, query);
    ld_shared(from + 4, head);
    ld_shared(from + 8, example);
    return {static_cast<int>(query), static_cast<int>(head), static_cast<int>(example)};
  }

  // A tile whose blocks the producer has found in the map. Whether there was one.
  TRACEA_DEVICE bool consume_mapped(Progress& at, PipelineState<1>& queries_state,
                                    OnlineSoftmax& softmax, u32 start, int consumer,
                                    int thread) const {
    const u32 parity = queries_state.consumer_parity();
    wait(smem.q_full, parity);
    queries_state.advance();
    u32 kind;
    ld_shared(shared_address(&smem.kind[parity]), kind);
    if (any_lane(kind == static_cast<u32>(TileKind::kNone))) return false;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] = 0.0f;
    softmax.reset();
    const auto rules = [&] {
      const AttentionTile tile = handed_over(parity);
      return Rules{interval(tile), tile, tile.query + consumer * 64};
    };
    // Results in place let queries come when they are stored.
    const auto release = [&] {
      if constexpr (!Traits::kStagesInPlace) {
        arrive_if(thread % kWarpSize == 0, smem.q_empty);
      }
    };
    if (any_lane(kind == static_cast<u32>(TileKind::kSees))) {
      SeenBlock seen = seen_block(at.keys);
      const bool is_mixed = any_lane(seen.is_mixed());
      begin(at, softmax, seen.block(), is_mixed, start, rules, consumer, thread);
      TRACEA_NO_UNROLL
      while (!any_lane(seen.is_last())) {
        seen = seen_block(at.keys);
        if (any_lane(seen.is_full())) {
          step<false>(at, softmax, seen.block(), start, rules, consumer, thread);
        } else {
          step<true>(at, softmax, seen.block(), start, rules, consumer, thread);
        }
      }
      release();
      end(at, start, thread);
    } else {
      release();
    }
    const AttentionTile tile = handed_over(parity);
    see_all(at.o, softmax, tile, tile.query + consumer * 64, thread);
    finish(at.o, softmax, tile, consumer, anew(thread));
    return true;
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const bool leads_warp = thread % kWarpSize == 0;
    const u32 start = shared_address(smem.q[0]) / 16;
    Progress at;
    PipelineState<1> queries_state;
    PipelineState<2> draw;
    OnlineSoftmax softmax(p.scale_log2);
    if constexpr (Traits::kPingPong) {
      if (consumer == kConsumers - 1) grant_turn(0);
    }
    if constexpr (Traits::kMapped) {
      TRACEA_NO_UNROLL
      while (consume_mapped(at, queries_state, softmax, start, consumer, thread)) {
      }
      if (elect_one()) cp_async_bulk_wait_group_read<0>();
      return;
    }
    u32 index = blockIdx.x;
    TRACEA_NO_UNROLL
    while (true) {
      if constexpr (Traits::kDraws) {
        wait(smem.drawn_full[draw.stage_idx], draw.consumer_parity());
        ld_shared(shared_address(&smem.drawn[draw.stage_idx]), index);
        index = warp_uniform(static_cast<int>(index));
        arrive_if(leads_warp, smem.drawn_empty[draw.stage_idx]);
        draw.advance();
      }
      if (index >= tiles()) break;
      const AttentionTile tile = tile_at(index);
      const Interval keys = interval(tile);
      const BlockRange range = blocks(tile, keys);
      const auto rules = [&] { return Rules{keys, tile, tile.query + consumer * 64}; };
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] = 0.0f;
      softmax.reset();
      if (range.count() > 0 || Traits::kStagesInPlace) {
        wait(smem.q_full, queries_state.consumer_parity());
        queries_state.advance();
      }
      if (range.count() > 0) {
        int block = range.last - 1;
        begin(at, softmax, block, false, start, rules, consumer, thread);
        const auto masked = [&] {
          step<true>(at, softmax, block, start, rules, consumer, thread);
        };
        if constexpr (kHasPartial) {
          TRACEA_NO_UNROLL
          while (--block >= range.full_last) masked();
          ++block;
        }
        TRACEA_NO_UNROLL
        while (--block >= range.full_first) {
          step<false>(at, softmax, block, start, rules, consumer, thread);
        }
        if constexpr (Traits::kHasLeft) {
          ++block;
          TRACEA_NO_UNROLL
          while (--block >= range.first) masked();
        }
        if constexpr (!Traits::kStagesInPlace) arrive_if(leads_warp, smem.q_empty);
        end(at, start, thread);
      }
      finish(at.o, softmax, tile, consumer, anew(thread));
      index += gridDim.x;
    }
    // Shared memory must outlive the copies out of it.
    if (elect_one()) cp_async_bulk_wait_group_read<0>();
  }

  // Queries that have seen no key take the mean of all values: read here, by each warp for
  // its rows. A lane adds up its columns of every eighth key.
  TRACEA_DEVICE void see_all(float (&o)[Sums::kAccumulators], OnlineSoftmax& softmax,
                             const AttentionTile& tile, int first, int thread) const {
    constexpr int kTogether = 4;  // blocks of columns
    using Element = typename Traits::Element;
    bool is_blind[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first + wgmma_accumulator_row(thread, 2 * half);
      is_blind[half] = softmax.is_blind(half) && row < queries(tile);
    }
    if (!__any_sync(0xFFFFFFFFu, is_blind[0] || is_blind[1])) return;
    const int kv_heads = p.heads / p.group, lane = thread % kWarpSize;
    const i64 row = static_cast<i64>(kv_heads) * kValueDim;
    const Element* values = static_cast<const Element*>(p.values) +
                            static_cast<i64>(tile.example) * p.kv_len * row +
                            tile.head / p.group * kValueDim +
                            wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; block += kTogether) {
      float sum[2 * kTogether] = {};
      TRACEA_NO_UNROLL
      for (int key = lane / 4; key < p.kv_len; key += 8) {
        TRACEA_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (block + i >= kBlocks) break;
          const Element* at = values + key * row + 8 * (block + i);
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
          found = is_blind[half] ? sum[i] : found;
        }
      }
    }
    softmax.see_all(is_blind, p.kv_len);
  }

  // Divides by the rows' totals and stores the consumer's rows, each warp its own.
  TRACEA_DEVICE void finish(float (&o)[Sums::kAccumulators], const OnlineSoftmax& softmax,
                            const AttentionTile& tile, int consumer, int thread) const {
    const int first = tile.query + consumer * 64;
    const int count = queries(tile);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first + wgmma_accumulator_row(thread, 2 * half);
      const bool is_query = row < count;
      float total = softmax.total(half), most = softmax.most(half), factor = 1.0f / total;
      if constexpr (Traits::kSinks) {
        add_sink(p.sinks[tile.head], most, total, factor);
      }
      const bool has_seen = softmax.has_seen(half) || most > softmax.most(half);
      TRACEA_UNROLL
      for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
        o[i] = is_query ? o[i] * factor : 0.0f;
        o[i + 1] = is_query ? o[i + 1] * factor : 0.0f;
      }
      if constexpr (Traits::kSavesLse) {
        const i64 at = (static_cast<i64>(tile.example) * p.heads + tile.head) * p.q_len + row;
        const float value = is_query ? log_sum_exp(most, total, has_seen) : kMaskedByJax;
        if (thread % 4 == 0 && row < p.q_len) p.lse[at] = value;
      }
    }
    stage(o, consumer, thread);
    store(tile, first, consumer, thread);
  }

  TRACEA_DEVICE u32 staging(int consumer) const {
    const u8* start = smem.staging;
    if constexpr (Traits::kStagesInPlace) start = smem.q[0];
    return shared_address(start) + consumer * 64 * 128;
  }

  // Rounds the consumer's results into shared memory, laid out as its queries.
  TRACEA_DEVICE void stage(const float (&o)[Sums::kAccumulators], int consumer,
                           int thread) const {
    if constexpr (Traits::kStagesInPlace) {
      meet_warpgroup(consumer);  // all of it have multiplied their queries
    } else {
      if (elect_one()) cp_async_bulk_wait_group_read<0>();  // the tile's before
      __syncwarp();
    }
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; block += 2) {
      u32 packed[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * block + 2 * i;
        packed[i] = at < Sums::kAccumulators
                        ? Packed<typename Traits::Element>::from({o[at], o[at + 1]}).bits
                        : 0u;
      }
      stmatrix_x4(staging(consumer) + block / 8 * kSlabBytesQ +
                      stmatrix_x4_byte<typename Traits::Swizzle>(thread, block % 8),
                  packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async_shared();
    __syncwarp();
  }

  // Stores the 16 rows of this warp, of the consumer's from row `first` on.
  TRACEA_DEVICE void store(const AttentionTile& tile, int first, int consumer,
                           int thread) const {
    const int row = thread / kWarpSize * 16;
    if (!elect_one()) return;
    TRACEA_UNROLL
    for (int slab = 0; slab < kValueSlabs; ++slab) {
      cp_async_bulk_tensor_4d_store(p.o, staging(consumer) + slab * kSlabBytesQ + row * 128,
                                    slab * 64, first + row, tile.head, tile.example);
    }
    cp_async_bulk_commit_group();
    if constexpr (Traits::kStagesInPlace) {
      cp_async_bulk_wait_group_read<0>();
      mbarrier_arrive(shared_address(&smem.q_empty));
    }
  }
};

template <class Traits>
TRACEA_DEVICE void attention_sm90(const AttentionSm90Params& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  using Kernel = AttentionSm90<Traits>;
  const Kernel kernel{p, *reinterpret_cast<typename Kernel::Shared*>(smem_bytes)};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == 0) {
    prefetch_tensormap(p.q);
    prefetch_tensormap(p.k);
    prefetch_tensormap(p.v);
    prefetch_tensormap(p.o);
  }
  kernel.initialize();
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (warp == 0 && elect_one()) kernel.produce();
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace tracea
