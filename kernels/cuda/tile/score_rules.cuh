// What becomes of the scores of 16 queries and a block of keys, in a warp's registers, before
// softmax: their bias, and that of keys which a query must not see.
//
// A lane holds, in registers 4 b .. 4 b + 3, columns 8 b + 2 t and the next of rows g and
// g + 8 (g = lane / 4, t = lane % 4): see tile/fragment.cuh. Params have the pointers, steps
// and lengths that are named here.
#pragma once

#include "ptx/convert.cuh"
#include "tile/attention_order.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/key_range.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_bias.cuh"

namespace tracea {

template <class Traits, class Params>
struct ScoreRules {
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;
  using Bias = BiasRow<typename Traits::BiasElement, Traits::kBiasPairs>;
  static constexpr int kTileKv = Traits::kTileKv, kCount = kTileKv / 2;
  static_assert(!Traits::kMaskBits || kTileKv <= 128, "a word of mask for a row of a lane");

  const Params& p;
  Interval keys;
  AttentionTile tile;
  int first;  // of the 16 queries
  int lane;

  TRACEA_DEVICE int row(int half) const { return first + mma_c_row(lane, 2 * half); }

  // Rows behind the last query look at what that looks at: nobody looks at them.
  TRACEA_DEVICE i64 stored_row(int half) const { return min(row(half), p.q_len - 1); }

  // What the product of queries and keys is added to.
  TRACEA_DEVICE void start(float (&s)[kCount], int block) const {
    const int key = block * kTileKv + mma_c_col(lane, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Bias bias{static_cast<const typename Traits::BiasElement*>(p.bias) +
                      tile.example * p.bias_example + tile.head * p.bias_head +
                      stored_row(half) * p.bias_row};
      Pair two{0.0f, 0.0f};
      if constexpr (!Traits::kBiasKeys) two.x = two.y = bias.one();
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
        if constexpr (Traits::kBiasKeys) two = bias.two_inside(key + 8 * (i / 4), p.kv_len);
        s[i] = unscaled_bias(two.x, p.unscale);
        s[i + 1] = unscaled_bias(two.y, p.unscale);
      }
    }
  }

  // Scores of keys that a query must not see, and of keys that do not exist. `is_mixed`:
  // whether segments and masks say so, too.
  TRACEA_DEVICE void mask(float (&s)[kCount], int block, bool is_mixed) const {
    const int key = block * kTileKv + mma_c_col(lane, 0), stored = p.kv_len - key;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int begin = keys.begin(row(half)) - key, end = keys.end(row(half)) - key;
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
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
    if constexpr (Traits::kSegments) mask_segments(s, key, stored);
    if constexpr (Traits::kMaskBits) mask_bits(s, block);
  }

 private:
  // Scores of keys of other segments. Those of keys that do not exist stay.
  TRACEA_DEVICE void mask_segments(float (&s)[kCount], int key, int stored) const {
    const i64 example = tile.example;
    const int* segments = p.kv_segments + example * p.kv_len + key;
    int own[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      own[half] = p.q_segments[example * p.q_len + stored_row(half)];
    }
    TRACEA_UNROLL
    for (int i = 0; i < kCount; i += 4) {
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

  // A word has a bit for each of a lane's keys of a block in one row.
  TRACEA_DEVICE void mask_bits(float (&s)[kCount], int block) const {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const u32* words = p.mask + tile.example * p.mask_example + tile.head * p.mask_head +
                         stored_row(half) * p.mask_row;
      const u32 word = words[4 * block + lane % 4];
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          s[i + j] = word >> (i / 4 * 2 + j) & 1u ? s[i + j] : kMasked;
        }
      }
    }
  }
};

}  // namespace tracea
