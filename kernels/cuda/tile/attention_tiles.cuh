// What both roles of attention_sm90 share: the arguments, shared memory with its barriers, and
// what a tile of queries sees by its place.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_order.cuh"
#include "tile/common.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionSm90Params {
  const TensorMap *q, *k, *v, *o;  // (columns, length, heads, batch), innermost first
  const TensorMap* bias_tiles;     // (keys, queries, heads, examples), or null
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
  float scale_log2;                // log2(e), times the scale or the cap of scores
  float unscale;                   // 1 / scale
  float to_cap;                    // scale / cap, or 1 / cap
  float scale;
};

// What ALiBi adds to a score: nothing, slope (key - query) or -slope |key - query|.
enum class Alibi { kNone, kLinear, kDistance };

// What a producer says of a tile that it hands to consumers.
enum class TileKind : u32 { kBlind, kSees, kNone };

template <class Traits>
struct AttentionSm90Shared {
  static constexpr int kSlabs = Traits::kSlabs, kValueSlabs = Traits::kValueSlabs;
  alignas(1024) u8 q[Traits::kStagesQ][kSlabs][Traits::kTileQ * 128];
  alignas(1024) u8 k[Traits::kStages][kSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 v[Traits::kStages][kValueSlabs][Traits::kTileKv * 128];
  // Of the result, if it does not take the place of the queries. Tiles of a bias behind it.
  static constexpr int kStaging =
      Traits::kStagesInPlace ? 0 : kValueSlabs * Traits::kTileQ * 128;
  static constexpr int kBias =
      Traits::kBiasTiles ? Traits::kStages * Traits::kTileQ * Traits::kBiasSlabs * 128 : 0;
  alignas(1024) u8 staging[kStaging + kBias + (kStaging + kBias == 0)];
  u64 q_full[Traits::kStagesQ], q_empty[Traits::kStagesQ];
  u64 k_full[Traits::kStages], k_empty[Traits::kStages];
  u64 v_full[Traits::kStages], v_empty[Traits::kStages];
  u64 drawn_full[2], drawn_empty[2];
  u32 drawn[2];
  u32 seen[Traits::kStages];  // SeenBlock of the keys
  // The tiles of the queries that are here, and those before, which are still stored.
  AttentionTile tile[2 * Traits::kStagesQ];
  TileKind kind[2 * Traits::kStagesQ];
};

template <class Traits>
struct AttentionTiles {
  using Shared = AttentionSm90Shared<Traits>;
  using Scores = typename Traits::Scores;  // q k'
  using Sums = typename Traits::Sums;      // p v
  using State = PipelineState<Traits::kStages>;
  using StateQ = PipelineState<Traits::kStagesQ>;
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;

  static constexpr int kTileQ = Traits::kTileQ, kTileKv = Traits::kTileKv;
  static constexpr int kHeadDim = Traits::kHeadDim, kSlabs = Traits::kSlabs;
  static constexpr int kValueDim = Traits::kValueDim, kValueSlabs = Traits::kValueSlabs;
  // Heads that share keys, whose queries lie side by side in a tile: row r has query
  // r / kPacked of head r % kPacked.
  static constexpr int kPacked = Traits::kPacked;
  static constexpr int kQueries = kTileQ / kPacked;  // of a tile
  static constexpr int kOwnQueries = 64 / kPacked;   // of a consumer
  static constexpr int kConsumers = kTileQ / 64;
  static constexpr int kWarps = kConsumers * kWarpgroupSize / kWarpSize;
  static constexpr u32 kSlabBytesQ = kTileQ * 128, kSlabBytesKv = kTileKv * 128;
  // Distances in a descriptor's unit of 16 bytes, from the start of the queries.
  static constexpr u32 kStageUnitsQ = kSlabs * kSlabBytesQ / 16;
  static constexpr u32 kUnitsToKeys = Traits::kStagesQ * kStageUnitsQ;
  static constexpr u32 kStageUnits = kSlabs * kSlabBytesKv / 16;
  static constexpr u32 kValueStageUnits = kValueSlabs * kSlabBytesKv / 16;
  static constexpr u32 kUnitsToValues = kUnitsToKeys + Traits::kStages * kStageUnits;
  // Of a block's tile of a bias, which comes with the keys.
  static constexpr u32 kBiasBytes =
      Traits::kBiasTiles ? Traits::kBiasSlabs * kSlabBytesQ : 0;

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
  static_assert(16 % kPacked == 0, "a warp stores the rows of whole queries");

  const AttentionSm90Params& p;
  Shared& smem;

  // Its head is the first of those that are packed.
  TRACEA_DEVICE AttentionTile tile_at(u32 index) const {
    const AttentionOrder order{ceil_div(p.q_len, kQueries), anew(p.heads) / kPacked, p.batch,
                               anew(p.section), Traits::kHasRight,
                               Traits::kExamplesFirst};
    AttentionTile tile = order.at(index, kQueries);
    tile.head *= kPacked;
    return tile;
  }

  TRACEA_DEVICE u32 tiles() const {
    return static_cast<u32>(ceil_div(p.q_len, kQueries)) * (p.heads / kPacked) * p.batch;
  }

  // The value, in a register of its own: what is computed from it is computed here, and not
  // carried through the loop over tiles in registers that there are too few of.
  TRACEA_DEVICE static int anew(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

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
    const int last = min(tile.query + kQueries, count) - 1;
    if constexpr (Traits::kMapped) return keys.seen_blocks(tile.query, last, kTileKv);
    return keys.blocks(tile.query, last, kTileKv);
  }

  // The stage of a tile of queries, a constant where there is one: that it stays one when it
  // advances is not seen by the compiler.
  TRACEA_DEVICE static int stage_of(const StateQ& queries) {
    return Traits::kStagesQ == 1 ? 0 : queries.stage_idx;
  }

  // Where the producer says which tile the queries are of.
  TRACEA_DEVICE static int place(const StateQ& queries) {
    return stage_of(queries) + Traits::kStagesQ * static_cast<int>(queries.consumer_parity());
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
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStagesQ; ++i) {
        mbarrier_init(shared_address(&smem.q_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.q_empty[i]), kWarps);
      }
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.k_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.v_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.k_empty[i]),
                      Traits::kBiasTiles ? kWarps : empty_arrivals(kConsumers, 1));
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

  TRACEA_DEVICE u32 bias_tile(int stage) const {
    return shared_address(smem.staging) + Shared::kStaging + stage * kBiasBytes;
  }
};

}  // namespace tracea
