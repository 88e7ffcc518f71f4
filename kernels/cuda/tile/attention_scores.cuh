// The products of a consumer of attention_sm90, a warpgroup that owns 64 queries, and what
// becomes of scores before softmax takes them: biases, caps and masks.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_tiles.cuh"
#include "tile/block_map.cuh"
#include "tile/fragment.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_bias.cuh"
#include "tile/soft_cap.cuh"

namespace tracea {

template <class Traits>
struct AttentionScores : AttentionTiles<Traits> {
  using Tiles = AttentionTiles<Traits>;
  using typename Tiles::Scores;
  using typename Tiles::Sums;
  using typename Tiles::State;
  using typename Tiles::Interval;
  using Tiles::p, Tiles::smem, Tiles::kTileKv, Tiles::kHeadDim, Tiles::kSlabBytesQ,
      Tiles::kSlabBytesKv, Tiles::kUnitsToKeys, Tiles::kStageUnitsQ, Tiles::kStageUnits, Tiles::kValueStageUnits,
      Tiles::kUnitsToValues, Tiles::ahead, Tiles::arrive_if, Tiles::bias_tile,
      Tiles::kPacked;
  using DescriptorQ = OperandDescriptor<false, 0>;
  using DescriptorK = OperandDescriptor<false, 0>;
  using DescriptorV = OperandDescriptor<true, Traits::kTileKv * 128>;
  using Bias = BiasRow<typename Traits::BiasElement, Traits::kBiasPairs>;

  static constexpr int kStepsScores = ceil_div(kHeadDim, 16);  // of 16 of the head
  static constexpr int kStepsSums = kTileKv / 16;              // of 16 keys
  // Whether the product of queries and keys is added to something.
  static constexpr bool kStarts =
      (Traits::kBiased && !Traits::kBiasTiles) || Traits::kAlibi != Alibi::kNone;

  // Whether there are registers for bits of the keys that rows see.
  static constexpr bool kTestsBits =
      !Traits::kMaskBits && !(Traits::kMapped && Traits::kValueDim > 128);

  static_assert(kPacked == 1 || !(kStarts || Traits::kBiasTiles || Traits::kMapped),
                "what is read for each row knows one head");

  // What the scores of a consumer's rows depend on, beside queries and keys. Where ids,
  // masks and biases lie is computed anew for each block: registers are too few to keep it.
  struct Rules {
    Interval keys;
    AttentionTile tile;
    int query;  // the consumer's first
  };

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
                                          int consumer, int stage_q, int stage) {
    const u32 q = start + stage_q * kStageUnitsQ + consumer * (64 * 128 / 16);
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
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = rules.query + wgmma_accumulator_row(thread, 2 * half) / kPacked;
      const int begin = rules.keys.begin(row) - first, end = rules.keys.end(row) - first;
      if constexpr (kTestsBits) {
        mask_by_bits(s, half, begin, end);
      } else {
        mask_one_by_one(s, half, begin, end, p.kv_len - first);
      }
    }
    if constexpr (kTestsBits) hide_behind(s, block, first);
    if (!is_mixed) return;
    if constexpr (Traits::kSegments) {
      mask_segments(s, rules, first, p.kv_len - first, thread);
    }
    if constexpr (Traits::kMaskBits) mask_bits(s, rules, block, thread);
  }

  // Of a row, whose keys are those of columns begin .. end - 1. A thread has a bit for each
  // of its keys: bits are tested many at a time, where columns are compared one by one.
  TRACEA_DEVICE static void mask_by_bits(float (&s)[Scores::kAccumulators], int half,
                                         int begin, int end) {
    u32 seen[ceil_div(kTileKv / 4, 32)];
    TRACEA_UNROLL
    for (int i = 0; i < ceil_div(kTileKv / 4, 32); ++i) {
      seen[i] = bits_of_range(keys_before(begin), keys_before(end), i);
    }
    TRACEA_UNROLL
    for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
      TRACEA_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int key = i / 4 * 2 + j;
        s[i + j] = seen[key / 32] >> key % 32 & 1u ? s[i + j] : kMasked;
      }
    }
  }

  // The same with fewer registers, and for keys that do not exist.
  TRACEA_DEVICE static void mask_one_by_one(float (&s)[Scores::kAccumulators], int half,
                                            int begin, int end, int stored) {
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

  // Scores of keys that do not exist, of which only the last block has some.
  TRACEA_DEVICE void hide_behind(float (&s)[Scores::kAccumulators], int block,
                                 int first) const {
    if (!__any_sync(0xFFFFFFFFu, (block + 1) * kTileKv > p.kv_len)) return;
    TRACEA_UNROLL
    for (int i = 0; i < Scores::kAccumulators; ++i) {
      s[i] = 8 * (i / 4) + i % 2 < p.kv_len - first ? s[i] : kNoKey;
    }
  }

  // Of the keys of a thread in a row, which are 8 i and 8 i + 1 columns from its first, those
  // before a column; not above 0 if there are none.
  TRACEA_DEVICE static constexpr int keys_before(int column) {
    return column / 8 * 2 + min(column % 8, 2);
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
    if constexpr (Traits::kBiased && !Traits::kBiasTiles) {
      start_biased<kChecks>(s, block, rules, thread);
    }
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
          s[i + j] = Traits::kBiased && !Traits::kBiasTiles ? s[i + j] + bias : bias;
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

  // Scales the scores and adds the tile of a bias. kClamps: numbers too low become kMasked.
  template <bool kClamps>
  TRACEA_DEVICE void add_bias(float (&s)[Scores::kAccumulators], int consumer, int stage,
                              int thread) const {
    const u32 tile = bias_tile(stage) + consumer * 64 * 128;
    TRACEA_UNROLL
    for (int block = 0; block < kTileKv / 8; block += 2) {
      u32 packed[4];
      ldmatrix_x4(packed,
                  tile + block / 8 * kSlabBytesQ +
                      stmatrix_x4_byte<typename Traits::Swizzle>(thread, block % 8));
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Pair bias = Packed<typename Traits::BiasElement>{packed[i]}.widen();
        float& x = s[4 * block + 2 * i];
        float& y = s[4 * block + 2 * i + 1];
        x = fmaf(x, p.scale, bias.x);
        y = fmaf(y, p.scale, bias.y);
        if constexpr (kClamps) {
          x = not_below_masked(x);
          y = not_below_masked(y);
        }
      }
    }
  }

  // Has the scores of a block, so that others may take the place of what they came from.
  template <bool kClamps>
  TRACEA_DEVICE void take_scores(float (&s)[Scores::kAccumulators], State& keys,
                                 int consumer, int thread) const {
    wgmma_fence_operands(s);
    if constexpr (Traits::kBiasTiles) {
      add_bias<kClamps>(s, consumer, keys.stage_idx, thread);
      __syncwarp();
    }
    const int readers = Traits::kBiasTiles ? kWarpSize : kWarpgroupSize;
    arrive_if(thread % readers == 0, smem.k_empty[keys.stage_idx]);
    keys.advance();
  }

  // Scores as softmax takes them.
  template <bool kMasks, class RulesOf>
  TRACEA_DEVICE void finish_scores(float (&s)[Scores::kAccumulators], int block,
                                   bool is_mixed, const RulesOf& rules,
                                   int thread) const {
    if constexpr (Traits::kSoftCap) soft_cap(s, p.to_cap);
    if constexpr (kMasks) mask(s, block, rules(), is_mixed, thread);
  }
};

}  // namespace tracea
