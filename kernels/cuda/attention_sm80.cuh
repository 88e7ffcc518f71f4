// attention_sm80: o = softmax(scale q k' , where allowed) v for each head, on every GPU since
// sm_80.
//
// A block computes one tile of kTileQ queries of one head; each of its warps owns 16 or 32
// of them. Blocks of kTileKv keys and of values, in turns, go round in a ring of kStages
// places, which asynchronous copies of all threads keep full:
//
//     k[n]    landed, barrier, start the copy kStages - 1 places further on    s = q k'
//     v[n]    landed, barrier, start ...     p = softmax step of s, o = alpha o + p v
//
// Both products are mma.sync: q, k and v are loaded from swizzled shared memory by ldmatrix
// (v transposed), p comes from registers.
//
// Which blocks a tile sees follows from positions and lengths, see tile/key_range.cuh, and
// (kMapped) from a map of segments and masks, see tile/block_map.cuh. Copies run ahead of
// products: each has a walk of its own over the same blocks. A tile past its example's
// queries sees none, and is zeros.
//
// A query that sees no key takes the mean of all values. With a map nobody knows until the
// end which queries do: then they read all values.
//
// With a bias s starts as bias / scale. With a cap s becomes tanh(scale s / cap), which
// softmax scales with the cap. A sink is a weight more in the rows' totals.
//
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "tile/attention_order.cuh"
#include "tile/block_map.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/head_copy.cuh"
#include "tile/key_range.cuh"
#include "tile/mean_of_values.cuh"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"
#include "tile/score_rules.cuh"
#include "tile/soft_cap.cuh"
#include "tile/warp_products.cuh"

namespace tracea {

struct AttentionSm80Params {
  const void *q, *k, *v;   // (batch, length, heads or heads / group, columns)
  void* o;                 // (batch, q_len, heads, columns)
  float* lse;              // (batch, heads, q_len); null unless it is saved
  const int* q_lengths;    // (batch), or null
  const int* kv_lengths;   // (batch), or null
  const int* q_segments;   // (batch, q_len), or null
  const int* kv_segments;  // (batch, kv_len), or null
  const float* sinks;      // (heads), or null
  const void* bias;        // (1 or batch, 1 or heads, 1 or q_len, 1 or kv_len)
  const u32* map;          // (1 or batch, 1 or heads, tiles, words), or null
  const u32* mask;         // (1 or batch, 1 or heads, 1 or q_len, blocks, 4)
  int batch, q_len, kv_len, heads;
  int group;                  // heads that share keys and values
  int left, right;            // of the window; not looked at if there is no limit
  int section;                // heads, of all examples, of one section
  int map_example, map_head;  // words from one to the next, 0 if they share
  int bias_row, mask_row;     // elements, likewise
  i64 bias_example, bias_head, mask_example, mask_head;
  float scale_log2;           // scale log2(e), or cap log2(e)
  float unscale;              // 1 / scale
  float to_cap;               // scale / cap
};

template <class Traits>
class AttentionSm80 {
 public:
  using Element = typename Traits::Element;
  using Params = AttentionSm80Params;
  using Rules = ScoreRules<Traits, Params>;
  using Interval = typename Rules::Interval;
  using Walk = typename Choose<Traits::kMapped, MapWalk, RangeWalk>::Type;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr int kTileQ = Traits::kTileQ, kTileKv = Traits::kTileKv;
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kThreads = Traits::kWarps * kWarpSize;
  static constexpr int kWarpRows = kTileQ / Traits::kWarps, kBands = kWarpRows / 16;
  static constexpr int kStepsSums = kTileKv / 16;  // of 16 keys
  static constexpr int kScores = kTileKv / 2, kSums = kValueDim / 2;  // of a band's lane

  using CopyQ = HeadCopy<kTileQ, kHeadDim, kThreads>;
  using CopyK = HeadCopy<kTileKv, kHeadDim, kThreads>;
  using CopyV = HeadCopy<kTileKv, kValueDim, kThreads>;
  static constexpr u32 kStageBytes =
      CopyK::kBytes > CopyV::kBytes ? CopyK::kBytes : CopyV::kBytes;

  static_assert(CopyQ::kBytes + Traits::kStages * kStageBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kThreads == Traits::kThreads, "the launch must have all the warps");
  static_assert(kBands * 16 * Traits::kWarps == kTileQ && (kBands == 1 || kBands == 2),
                "a warp owns 16 or 32 queries");
  static_assert(CopyV::kSlabs * kTileQ * 128 <= Traits::kSmemBytes,
                "results fit where operands were");

  TRACEA_DEVICE AttentionSm80(const Params& params, u32 smem, const AttentionTile& tile)
      : p(params),
        smem_(smem),
        ring_(smem + CopyQ::kBytes),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        warp_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize)),
        tile_(tile),
        kv_heads_(p.heads / p.group),
        kv_head_(tile.head / p.group),
        keys_(interval()),
        range_(blocks()),
        ahead_(map(), range_),
        own_queries_(smem + warp_ * kWarpRows * 128) {}

  TRACEA_DEVICE void run() {
    float o[kBands][kSums] = {};
    OnlineSoftmax softmax[2] = {OnlineSoftmax(p.scale_log2), OnlineSoftmax(p.scale_log2)};
    attend(o, softmax);
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) finish(o[band], softmax[band], band);
    store();
  }

 private:
  // --- what follows from the tile ----------------------------------------------------

  TRACEA_DEVICE int queries() const {
    return Traits::kQLengths ? min(max(p.q_lengths[tile_.example], 0), p.q_len) : p.q_len;
  }

  TRACEA_DEVICE Interval interval() const {
    const int limit = Traits::kKvLengths
                          ? min(max(p.kv_lengths[tile_.example], 0), p.kv_len)
                          : p.kv_len;
    if constexpr (Traits::kFromEnd) {
      const int ahead = limit - queries();  // of the first query
      return {p.kv_len, limit, p.left - ahead, p.right + ahead};
    }
    return {p.kv_len, limit, p.left, p.right};
  }

  TRACEA_DEVICE BlockRange blocks() const {
    const int count = queries();
    if (tile_.query >= count) return {0, 0, 0, 0};
    const int last = min(tile_.query + kTileQ, count) - 1;
    if constexpr (Traits::kMapped) return keys_.seen_blocks(tile_.query, last, kTileKv);
    return keys_.blocks(tile_.query, last, kTileKv);
  }

  // The words of the tile in the map.
  TRACEA_DEVICE const u32* map() const {
    if constexpr (!Traits::kMapped) return nullptr;
    const int words = 2 * ceil_div(ceil_div(p.kv_len, kTileKv), 32);
    return p.map + tile_.example * p.map_example + tile_.head * p.map_head +
           tile_.query / kTileQ * words;
  }

  TRACEA_DEVICE int first_row(int band) const {
    return tile_.query + warp_ * kWarpRows + 16 * band;
  }

  TRACEA_DEVICE Rules rules(int band) const {
    return {p, keys_, tile_, first_row(band), lane_};
  }

  // --- copies ------------------------------------------------------------------------

  // Bytes to the tile's head of its example, of an operand with `heads` heads of kColumns.
  template <int kColumns>
  TRACEA_DEVICE i64 to_head(int heads, int rows, int head) const {
    const i64 row = static_cast<i64>(tile_.example) * rows * heads + head;
    return row * static_cast<i64>(kColumns * sizeof(Element));
  }

  template <int kColumns>
  TRACEA_DEVICE const u8* head(const void* operand, int heads, int rows, int head) const {
    return static_cast<const u8*>(operand) + to_head<kColumns>(heads, rows, head);
  }

  template <int kColumns>
  TRACEA_DEVICE static i64 pitch(int heads) {
    return static_cast<i64>(heads) * (kColumns * sizeof(Element));
  }

  TRACEA_DEVICE void start_queries() const {
    CopyQ::start(smem_, head<kHeadDim>(p.q, p.heads, p.q_len, tile_.head),
                 pitch<kHeadDim>(p.heads), tile_.query, p.q_len);
  }

  // Starts the copy of the keys of the block that copies have come to, or of its values,
  // and goes on to the next. One group each, whether it has copies or not.
  template <bool kKeys>
  TRACEA_DEVICE void start_next() {
    if (has_ahead_) {
      const int heads = anew(kv_heads_), own = anew(kv_head_);
      const int row = ahead_.block() * kTileKv;
      const u32 to = ring_ + writing_ * kStageBytes;
      if constexpr (kKeys) {
        CopyK::start(to, head<kHeadDim>(p.k, heads, p.kv_len, own), pitch<kHeadDim>(heads),
                     row, p.kv_len);
      } else {
        CopyV::start(to, head<kValueDim>(p.v, heads, p.kv_len, own),
                     pitch<kValueDim>(heads), row, p.kv_len);
        has_ahead_ = ahead_.next();
      }
    }
    writing_ = after(writing_);
    cp_async_commit_group();
  }

  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
  }

  // The oldest copy that nobody has read has landed for all threads, all have read the one
  // before, and the next copy starts. kKeys: whether keys have landed.
  template <bool kKeys>
  TRACEA_DEVICE void turn() {
    cp_async_wait_group<Ring::kGroupsBehindA>();
    __syncthreads();
    start_next<kKeys == (Traits::kStages % 2 == 1)>();
  }

  // What the last turn waited for: its place is the next to be written.
  TRACEA_DEVICE u32 landed() const { return ring_ + writing_ * kStageBytes; }

  // --- products ----------------------------------------------------------------------

  // s += q k'
  TRACEA_DEVICE void multiply_keys(float (&s)[kBands][kScores], u32 keys) const {
    multiply_head_columns<Element, CopyQ, CopyK>(s, anew(own_queries_), keys, anew(lane_));
  }

  // o += weights v
  TRACEA_DEVICE void multiply_values(float (&o)[kBands][kSums],
                                     const u32 (&weights)[kBands][kStepsSums][4],
                                     u32 values) const {
    multiply_head_rows<Element, CopyV>(o, weights, values, anew(lane_));
  }

  // Scores become weights, and earlier sums are multiplied with what that asks for.
  TRACEA_DEVICE static void weigh(float (&s)[kScores], OnlineSoftmax& softmax,
                                  float (&o)[kSums], u32 (&weights)[kStepsSums][4]) {
    float alpha[2];
    if (!softmax.update(s, alpha)) {
      TRACEA_UNROLL
      for (int i = 0; i < kSums; ++i) o[i] *= alpha[i / 2 % 2];
    }
    round_to_fragments<Element>(s, weights);
  }

  // --- the loop over blocks ------------------------------------------------------------

  TRACEA_DEVICE void start_scores(float (&s)[kScores], int block, int band) const {
    if constexpr (Traits::kBiased) {
      rules(band).start(s, block);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
    }
  }

  TRACEA_DEVICE void attend(float (&o)[kBands][kSums], OnlineSoftmax (&softmax)[2]) {
    Walk walk(map(), range_);
    has_ahead_ = ahead_.next();
    if (!has_ahead_) {
      if constexpr (Traits::kMapped) {
        TRACEA_UNROLL
        for (int band = 0; band < kBands; ++band) softmax[band].see_none();
      }
      return;
    }
    start_queries();  // in one group with the first keys
    TRACEA_UNROLL
    for (int i = 0; i < Ring::kPrologueGroups; ++i) {
      if (i % 2 == 0) {
        start_next<true>();
      } else {
        start_next<false>();
      }
    }
    TRACEA_NO_UNROLL
    while (walk.next()) {
      const int block = walk.block();
      const bool is_full = Traits::kMapped ? walk.is_full() : range_.is_full(block);
      float s[kBands][kScores];
      TRACEA_UNROLL
      for (int band = 0; band < kBands; ++band) start_scores(s[band], block, band);
      turn<true>();
      multiply_keys(s, landed());
      turn<false>();
      u32 weights[kBands][kStepsSums][4];
      TRACEA_UNROLL
      for (int band = 0; band < kBands; ++band) {
        if constexpr (Traits::kSoftCap) soft_cap(s[band], p.to_cap);
        if (!is_full) rules(band).mask(s[band], block, walk.is_mixed());
        weigh(s[band], softmax[band], o[band], weights[band]);
      }
      multiply_values(o, weights, landed());
    }
    cp_async_wait_group<0>();
  }

  // --- results -----------------------------------------------------------------------

  // Divides by the rows' totals, and stages the band's rows.
  TRACEA_DEVICE void finish(float (&o)[kSums], OnlineSoftmax& softmax, int band) const {
    const int count = queries();
    if constexpr (Traits::kMapped) see_all(o, softmax, band, count);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row(band) + mma_c_row(lane_, 2 * half);
      const bool is_query = row < count;
      float total = softmax.total(half), most = softmax.most(half), factor = 1.0f / total;
      if constexpr (Traits::kSinks) add_sink(p.sinks[tile_.head], most, total, factor);
      const bool has_seen = softmax.has_seen(half) || most > softmax.most(half);
      TRACEA_UNROLL
      for (int i = 2 * half; i < kSums; i += 4) {
        o[i] = is_query ? o[i] * factor : 0.0f;
        o[i + 1] = is_query ? o[i + 1] * factor : 0.0f;
      }
      if constexpr (Traits::kSavesLse) {
        const i64 at =
            (static_cast<i64>(tile_.example) * p.heads + tile_.head) * p.q_len + row;
        const float value = is_query ? log_sum_exp(most, total, has_seen) : kMaskedByJax;
        if (lane_ % 4 == 0 && row < p.q_len) p.lse[at] = value;
      }
    }
    // In place of the queries, of which a warp reads its own rows alone, if they fit there.
    if constexpr (CopyV::kSlabs > CopyQ::kSlabs) {
      if (band == 0) __syncthreads();
    }
    stage_band<Element, kTileQ>(o, smem_, warp_ * kWarpRows + 16 * band, lane_);
  }

  // Queries that have seen no key take the mean of all values.
  TRACEA_DEVICE void see_all(float (&o)[kSums], OnlineSoftmax& softmax, int band,
                             int count) const {
    bool is_blind[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row(band) + mma_c_row(lane_, 2 * half);
      is_blind[half] = softmax.is_blind(half) && row < count;
    }
    if (!__any_sync(0xFFFFFFFFu, is_blind[0] || is_blind[1])) return;
    const u8* values = head<kValueDim>(p.v, kv_heads_, p.kv_len, kv_head_);
    take_sum_of_values(o, is_blind, reinterpret_cast<const Element*>(values),
                       static_cast<i64>(kv_heads_) * kValueDim, p.kv_len, lane_);
    softmax.see_all(is_blind, p.kv_len);
  }

  // Each warp stores its own rows.
  TRACEA_DEVICE void store() const {
    __syncwarp();
    const i64 row_bytes = pitch<kValueDim>(p.heads);
    u8* to = static_cast<u8*>(p.o) + to_head<kValueDim>(p.heads, p.q_len, tile_.head) +
             tile_.query * row_bytes;
    store_staged<Element, kTileQ, kValueDim, kWarpRows>(
        smem_, warp_ * kWarpRows, p.q_len - tile_.query, to, row_bytes, lane_);
  }

  const Params& p;
  const u32 smem_, ring_;
  const int lane_, warp_;
  const AttentionTile tile_;
  const int kv_heads_, kv_head_;
  const Interval keys_;
  const BlockRange range_;
  Walk ahead_;  // of copies
  const u32 own_queries_;
  bool has_ahead_ = false;
  int writing_ = 0;
};

template <class Traits>
TRACEA_DEVICE void attention_sm80(const AttentionSm80Params& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  using Kernel = AttentionSm80<Traits>;
  const AttentionOrder order{ceil_div(p.q_len, Traits::kTileQ), p.heads, p.batch, p.section,
                             Traits::kHasRight};
  const AttentionTile tile = order.at(blockIdx.x, Traits::kTileQ);
  Kernel(p, shared_address(smem_bytes), tile).run();
}

}  // namespace tracea
