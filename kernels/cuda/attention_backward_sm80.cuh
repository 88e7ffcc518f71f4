// attention_backward_sm80: the gradients of attention, on every GPU since sm_80.
//
//     p = 2^(scale log2(e) q k' - exponent)    where query and key see each other, else 0
//     ds = p * (do v' - delta)                 exponent, delta: see attention_rows.cuh
//     dv = p' do        dk = scale ds' q       summed over the queries of all heads that
//     dq = scale ds k                          share the keys
//
// One template is two kernels. A block owns a tile of rows of one head, each of its warps 16
// or 32 of them, and meets blocks of other rows, which asynchronous copies of all threads
// keep coming in a ring:
//
//               own rows    other rows     s = own other'    t = own_values other_values'
//   kOfKeys     k, v        q, do          dv += p do        dk += ds q
//   else        q, do       k, v                             dq += ds k
//
// What is own is called q, and what is other kv, in the words of tile/score_rules.cuh, which
// say what is seen of what: for keys the rules come in each other's place. Nothing is added
// in memory: results do not depend on who computes what when.
//
// With a cap s is tanh(scale q k' / cap), and ds has its derivative 1 - s^2 more.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/attention_order.cuh"
#include "tile/block_map.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/head_copy.cuh"
#include "tile/key_range.cuh"
#include "tile/pipeline.cuh"
#include "tile/score_rules.cuh"
#include "tile/soft_cap.cuh"
#include "tile/warp_products.cuh"

namespace tracea {

struct AttentionBackwardSm80Params {
  const void *own, *own_values;      // (batch, q_len, heads, columns)
  const void *other, *other_values;  // (batch, kv_len, other heads, columns)
  void *d_own, *d_own_values;        // gradients of what is own; null for do
  const float* rows;                 // (batch, heads of queries, 2 or 3, padded)
  const float* everywhere;  // (batch, heads, columns), or null: what all dv have more
  const int *own_lengths, *other_lengths;  // (batch), or null
  const int* q_segments;                   // of own rows, (batch, q_len), or null
  const int* kv_segments;                  // of other rows, (batch, kv_len), or null
  const u32* map;   // (1 or batch, 1 or heads of queries, tiles, words), or null
  const u32* mask;  // (1 or batch, 1 or heads of queries, 1 or q_len, blocks, 4), or null
  int batch, q_len, kv_len, heads, padded;
  int group;                  // heads of queries that share keys and values
  int left, right;            // of the window; not looked at if there is no limit
  int section;                // heads, of all examples, of one section
  int map_example, map_head;  // words from one to the next, 0 if they share
  int mask_row;               // likewise
  i64 mask_example, mask_head;
  float scale, scale_log2;  // scale log2(e), or cap log2(e)
  float to_cap;             // scale / cap
};

template <class Traits>
class AttentionBackwardSm80 {
 public:
  using Element = typename Traits::Element;
  using Params = AttentionBackwardSm80Params;
  using Rules = ScoreRules<Traits, Params>;
  using Interval = typename Rules::Interval;
  using Walk = typename Choose<Traits::kMapped, MapWalk, RangeWalk>::Type;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr bool kOfKeys = Traits::kOfKeys;
  static constexpr int kTile = Traits::kTileQ, kBlock = Traits::kTileKv;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kWarps * kWarpSize;
  static constexpr int kWarpRows = kTile / Traits::kWarps, kBands = kWarpRows / 16;
  static constexpr int kScores = kBlock / 2, kSums = kHeadDim / 2;  // of a band's lane
  static constexpr int kSteps = kBlock / 16;

  using CopyOwn = HeadCopy<kTile, kHeadDim, kThreads>;
  using CopyOther = HeadCopy<kBlock, kHeadDim, kThreads>;
  // A stage: other, other values, and of other queries exponents and deltas.
  static constexpr u32 kPlaneBytes = kBlock * 4;
  static constexpr u32 kNumbers = 2 * CopyOther::kBytes;
  static constexpr u32 kStageBytes = kNumbers + (kOfKeys ? 2 * kPlaneBytes : 0);

  static_assert(2 * CopyOwn::kBytes + Traits::kStages * kStageBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kThreads == Traits::kThreads, "the launch must have all the warps");
  static_assert(kBands * 16 * Traits::kWarps == kTile && (kBands == 1 || kBands == 2),
                "a warp owns 16 or 32 rows");
  static_assert(kBlock / 2 <= kThreads && kBlock % 16 == 0, "a unit of numbers a thread");

  TRACEA_DEVICE AttentionBackwardSm80(const Params& params, u32 smem,
                                      const AttentionTile& tile)
      : p(params),
        smem_(smem),
        ring_(smem + 2 * CopyOwn::kBytes),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        warp_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize)),
        tile_(tile),
        own_count_(count(p.own_lengths, p.q_len)),
        other_count_(count(p.other_lengths, p.kv_len)),
        keys_(interval()),
        range_(blocks()) {}

  TRACEA_DEVICE void run() {
    float d_own[kBands][kSums] = {}, d_values[kBands][kSums] = {};
    if constexpr (!kOfKeys) load_numbers();
    const int heads = kOfKeys ? p.group : 1, first = kOfKeys ? tile_.head * p.group : tile_.head;
    TRACEA_NO_UNROLL
    for (int i = 0; i < heads; ++i) meet(d_own, d_values, first + i);
    scale(d_own, p.scale);
    store(d_own, p.d_own, smem_);
    if constexpr (kOfKeys) {
      scale(d_values, 1.0f);
      if constexpr (Traits::kEverywhere) add_everywhere(d_values);
      store(d_values, p.d_own_values, smem_ + CopyOwn::kBytes);
    }
  }

 private:
  // --- what follows from the tile ----------------------------------------------------

  TRACEA_DEVICE int count(const int* lengths, int stored) const {
    return lengths ? min(max(lengths[tile_.example], 0), stored) : stored;
  }

  // Of the last block of queries all are counted: their p are 0, see attention_rows.cuh.
  TRACEA_DEVICE Interval interval() const {
    const int limit = kOfKeys ? round_up(other_count_, kBlock) : other_count_;
    if constexpr (Traits::kFromEnd) {
      const int behind = own_count_ - other_count_;
      return {p.kv_len, limit, p.left + behind, p.right - behind};
    }
    return {p.kv_len, limit, p.left, p.right};
  }

  TRACEA_DEVICE BlockRange blocks() const {
    const int end = min(tile_.query + kTile, own_count_);
    if (tile_.query >= end) return {0, 0, 0, 0};
    return keys_.seen_blocks(tile_.query, end - 1, kBlock);
  }

  // The words of the tile in the map; `head` of queries.
  TRACEA_DEVICE const u32* map(int head) const {
    if constexpr (!Traits::kMapped) return nullptr;
    const int words = 2 * ceil_div(ceil_div(p.kv_len, kBlock), 32);
    return p.map + tile_.example * p.map_example + head * p.map_head +
           tile_.query / kTile * words;
  }

  TRACEA_DEVICE int row(int band, int half) const {
    return tile_.query + warp_ * kWarpRows + 16 * band + mma_c_row(lane_, 2 * half);
  }

  TRACEA_DEVICE const float* numbers(int head) const {
    return p.rows + (static_cast<i64>(tile_.example) * p.heads * (kOfKeys ? p.group : 1) + head) *
                        (2 + Traits::kSegments) * p.padded;
  }

  // Of own queries.
  TRACEA_DEVICE void load_numbers() {
    const float* const exponents = numbers(tile_.head);
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int own = row(band, half);
        const bool is_query = own < p.padded;
        exponents_[band][half] = is_query ? exponents[own] : __int_as_float(0x7F800000);
        deltas_[band][half] = is_query ? exponents[p.padded + own] : 0.0f;
      }
    }
  }

  // --- copies ------------------------------------------------------------------------

  // Bytes to the first column of a head in row 0 of the example.
  TRACEA_DEVICE i64 to_head(int rows, int heads, int head) const {
    const i64 before = static_cast<i64>(tile_.example) * rows * heads + head;
    return before * static_cast<i64>(kHeadDim * sizeof(Element));
  }

  TRACEA_DEVICE const u8* at_head(const void* operand, int rows, int heads, int head) const {
    return static_cast<const u8*>(operand) + to_head(rows, heads, head);
  }

  TRACEA_DEVICE static i64 pitch(int heads) {
    return static_cast<i64>(heads) * (kHeadDim * sizeof(Element));
  }

  TRACEA_DEVICE void start_own() const {
    CopyOwn::start(smem_, at_head(p.own, p.q_len, p.heads, tile_.head), pitch(p.heads),
                   tile_.query, p.q_len);
    CopyOwn::start(smem_ + CopyOwn::kBytes,
                   at_head(p.own_values, p.q_len, p.heads, tile_.head), pitch(p.heads),
                   tile_.query, p.q_len);
  }

  // Starts the copies of the block that copies have come to, and goes on to the next. One
  // group each, whether it has copies or not. Rows past those of the example become zeros: a
  // weight of zero times NaN would be NaN.
  TRACEA_DEVICE void start_next(Walk& ahead, bool& has_ahead, int& writing,
                                int of_head) const {
    if (has_ahead) {
      const int head = anew(of_head);
      const int heads = kOfKeys ? p.heads * p.group : p.heads / p.group;
      const int other = kOfKeys ? head : head / p.group;
      const int row = ahead.block() * kBlock;
      const u32 to = ring_ + writing * kStageBytes;
      CopyOther::start(to, at_head(p.other, p.kv_len, heads, other), pitch(heads), row,
                       other_count_);
      CopyOther::start(to + CopyOther::kBytes, at_head(p.other_values, p.kv_len, heads, other),
                       pitch(heads), row, other_count_);
      if constexpr (kOfKeys) start_numbers(to + kNumbers, numbers(head) + row);
      has_ahead = ahead.next();
    }
    writing = after(writing);
    cp_async_commit_group();
  }

  TRACEA_DEVICE void start_numbers(u32 to, const float* exponents) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int plane = thread / (kBlock / 4), unit = thread % (kBlock / 4);
    if (plane < 2) {
      cp_async_or_zero<16>(to + 16 * thread, exponents + plane * p.padded + 4 * unit, true);
    }
  }

  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
  }

  // --- the loop over blocks ------------------------------------------------------------

  // All blocks that the tile sees in one head of queries.
  TRACEA_DEVICE void meet(float (&d_own)[kBands][kSums], float (&d_values)[kBands][kSums],
                          int head) {
    Walk walk(map(head), range_), ahead(map(head), range_);
    bool has_ahead = ahead.next();
    if (!has_ahead) return;
    if (!has_own_) start_own();  // in one group with the first block
    has_own_ = true;
    __syncthreads();  // all have read the blocks of the head before
    int reading = 0, writing = 0;
    TRACEA_UNROLL
    for (int i = 0; i < Ring::kPrologueGroups; ++i) start_next(ahead, has_ahead, writing, head);
    TRACEA_NO_UNROLL
    while (walk.next()) {
      const int block = walk.block();
      const bool is_full = Traits::kMapped ? walk.is_full() : range_.is_full(block);
      cp_async_wait_group<Ring::kGroupsBehindA>();
      __syncthreads();
      start_next(ahead, has_ahead, writing, head);
      step(d_own, d_values, ring_ + reading * kStageBytes, block, head, is_full,
           walk.is_mixed());
      reading = after(reading);
    }
    cp_async_wait_group<0>();
  }

  TRACEA_DEVICE void step(float (&d_own)[kBands][kSums], float (&d_values)[kBands][kSums],
                          u32 other, int block, int head, bool is_full,
                          bool is_mixed) const {
    const u32 own = anew(smem_ + warp_ * kWarpRows * 128);
    const int lane = anew(lane_);
    float s[kBands][kScores] = {}, t[kBands][kScores] = {};
    u32 rounded[kBands][kSteps][4];
    multiply_head_columns<Element, CopyOwn, CopyOther>(s, own, other, lane);
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if constexpr (Traits::kSoftCap) soft_cap(s[band], p.to_cap);
      if (!is_full) {
        const AttentionTile tile{tile_.query, head, tile_.example};
        const int first = tile_.query + warp_ * kWarpRows + 16 * band;
        Rules{p, keys_, tile, first, lane_}.mask(s[band], block, is_mixed);
      }
      weigh(s[band], rounded[band], other + kNumbers, band);
    }
    if constexpr (kOfKeys) {
      multiply_head_rows<Element, CopyOther>(d_values, rounded, other + CopyOther::kBytes,
                                             lane);
    }
    multiply_head_columns<Element, CopyOwn, CopyOther>(t, own + CopyOwn::kBytes,
                                                       other + CopyOther::kBytes, lane);
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      differentiate(t[band], s[band], rounded[band], other + kNumbers, band);
    }
    multiply_head_rows<Element, CopyOther>(d_own, rounded, other, lane);
  }

  // A number of the queries of registers 4 j .. 4 j + 3: of columns, or of rows.
  TRACEA_DEVICE void spread(float (&x)[4], u32 plane, const float (&own)[2], int j) const {
    if constexpr (kOfKeys) {
      const Pair two = ld_shared_pair(plane + 4 * mma_c_col(lane_, 0) + 32 * j);
      x[0] = x[2] = two.x;
      x[1] = x[3] = two.y;
    } else {
      x[0] = x[1] = own[0];
      x[2] = x[3] = own[1];
    }
  }

  TRACEA_DEVICE float weight(float s, float exponent) const {
    return ex2_approx(fmaf(s, p.scale_log2, -exponent));
  }

  // p of scores, rounded for the product with do; in their place, unless they are capped.
  TRACEA_DEVICE void weigh(float (&s)[kScores], u32 (&rounded)[kSteps][4], u32 plane,
                           int band) const {
    if constexpr (Traits::kSoftCap && !kOfKeys) return;
    float weights[kScores];
    TRACEA_UNROLL
    for (int j = 0; j < kBlock / 8; ++j) {
      float exponents[4];
      spread(exponents, plane, exponents_[kOfKeys ? 0 : band], j);
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) weights[4 * j + i] = weight(s[4 * j + i], exponents[i]);
    }
    if constexpr (kOfKeys) round_to_fragments<Element>(weights, rounded);
    if constexpr (!Traits::kSoftCap) {
      TRACEA_UNROLL
      for (int i = 0; i < kScores; ++i) s[i] = weights[i];
    }
  }

  // ds = p * (t - delta), rounded.
  TRACEA_DEVICE void differentiate(float (&t)[kScores], const float (&s)[kScores],
                                   u32 (&rounded)[kSteps][4], u32 plane, int band) const {
    TRACEA_UNROLL
    for (int j = 0; j < kBlock / 8; ++j) {
      float deltas[4], exponents[4];
      spread(deltas, plane + kPlaneBytes, deltas_[kOfKeys ? 0 : band], j);
      if constexpr (Traits::kSoftCap) {
        spread(exponents, plane, exponents_[kOfKeys ? 0 : band], j);
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float score = s[4 * j + i];
        float factor = score;
        if constexpr (Traits::kSoftCap) {
          // Of scores that do not count the square is too large for it.
          factor = weight(score, exponents[i]) * fmaxf(fmaf(-score, score, 1.0f), 0.0f);
        }
        t[4 * j + i] = factor * (t[4 * j + i] - deltas[i]);
      }
    }
    round_to_fragments<Element>(t, rounded);
  }

  // --- results -----------------------------------------------------------------------

  // Rows past those that the example has have no gradient.
  TRACEA_DEVICE void scale(float (&d)[kBands][kSums], float factor) const {
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      TRACEA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        d[band][i] = row(band, i / 2 % 2) < own_count_ ? d[band][i] * factor : 0.0f;
      }
    }
  }

  // What queries that see no key, and take the mean of all values, add to every dv.
  TRACEA_DEVICE void add_everywhere(float (&d_values)[kBands][kSums]) const {
    const float* const from =
        p.everywhere + (static_cast<i64>(tile_.example) * p.heads + tile_.head) * kHeadDim;
    TRACEA_UNROLL
    for (int block = 0; block < kHeadDim / 8; ++block) {
      const int column = 8 * block + mma_c_col(lane_, 0);
      TRACEA_UNROLL
      for (int band = 0; band < kBands; ++band) {
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) d_values[band][4 * block + i] += from[column + i % 2];
      }
    }
  }

  // Stages the warp's rows where its operands were, and stores them.
  TRACEA_DEVICE void store(const float (&d)[kBands][kSums], void* result, u32 staging) const {
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      stage_band<Element, kTile>(d[band], staging, warp_ * kWarpRows + 16 * band, lane_);
    }
    __syncwarp();
    const i64 before = to_head(p.q_len, p.heads, tile_.head) + tile_.query * pitch(p.heads);
    store_staged<Element, kTile, kHeadDim, kWarpRows>(
        staging, warp_ * kWarpRows, p.q_len - tile_.query,
        static_cast<u8*>(result) + before, pitch(p.heads), lane_);
  }

  const Params& p;
  const u32 smem_, ring_;
  const int lane_, warp_;
  const AttentionTile tile_;
  const int own_count_, other_count_;
  const Interval keys_;
  const BlockRange range_;
  float exponents_[kOfKeys ? 1 : kBands][2], deltas_[kOfKeys ? 1 : kBands][2];
  bool has_own_ = false;
};

template <class Traits>
TRACEA_DEVICE void attention_backward_sm80(const AttentionBackwardSm80Params& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  using Kernel = AttentionBackwardSm80<Traits>;
  const AttentionOrder order{ceil_div(p.q_len, Traits::kTileQ), p.heads, p.batch, p.section,
                             !Traits::kOfKeys && Traits::kHasRight};
  const AttentionTile tile = order.at(blockIdx.x, Traits::kTileQ);
  Kernel(p, shared_address(smem_bytes), tile).run();
}

}  // namespace tracea
