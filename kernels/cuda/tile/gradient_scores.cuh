// What scores of attention have beside the product of queries and keys, as its gradients
// need them: a bias, ALiBi's bias, and a mask whose content only the device knows.
//
//     x = scale q k' + bias + slope (key - query)      or - slope |key - query|
//
// Scores lie in registers of a warpgroup, its own 64 rows by columns of a block of others
// (tile/fragment.cuh). Rows are queries, or (kOfKeys) keys, as a gradient's own rows are; a
// bias and a mask always have queries along rows in memory, words of a mask own rows.
//
// A bias of which a tile of keys and queries can be copied lies in shared memory, in slabs of
// 64 keys, 128 swizzled bytes a query; for keys it is read transposed. Other biases are read
// where they lie. What is no query or key has no bias: its weight is 0, and must not become
// NaN.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/sync.cuh"
#include "tile/block_map.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/key_range.cuh"
#include "tile/low_scores.cuh"
#include "tile/score_bias.cuh"

namespace tracea {

struct GradientScoresParams {
  const void* bias;           // (1 or batch, 1 or heads, 1 or q_len, 1 or kv_len), or null
  const float* alibi_slopes;  // (heads), or null
  const u32* map;   // (1 or batch, 1 or heads, tiles, words), or null: tile/block_map.cuh
  const u32* mask;  // (1 or batch, 1 or heads, 1 or own rows, blocks, 4), or null
  int q_len, kv_len;
  int ahead;                  // the position of the first query, in keys
  int map_example, map_head;  // words from one to the next, 0 if they share
  int bias_row, mask_row;     // elements and words, likewise
  i64 bias_example, bias_head, mask_example, mask_head;
  float scale;
};

template <class Traits, bool kOfKeys, int kBlock>
struct GradientScores {
  using Element = typename Traits::BiasElement;
  static constexpr int kCount = kBlock / 2;
  static constexpr bool kMoves = Traits::kBiased || Traits::kAlibi;
  static constexpr bool kReadsTiles = Traits::kBiased && Traits::kBiasTiles;

  const GradientScoresParams& p;
  int head, example;  // of queries
  int own, other;     // the first row of the warpgroup, and the first column

  // s becomes x. `tile`: the address of the bias of the warpgroup's rows in shared memory.
  template <class Swizzle, u32 kSlabBytes>
  TRACEA_DEVICE void add(float (&s)[kCount], u32 tile, int thread) const {
    if constexpr (kReadsTiles) {
      add_tile<Swizzle, kSlabBytes>(s, tile, thread);
    } else if constexpr (Traits::kBiased) {
      add_from_memory(s, thread);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) s[i] *= p.scale;
    }
    if constexpr (Traits::kAlibi) add_alibi(s, thread);
  }

  // Weights of keys that a mask hides become 0; `block` of others.
  TRACEA_DEVICE void mask(float (&weights)[kCount], int block, int thread) const {
    const int length = kOfKeys ? p.kv_len : p.q_len;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const i64 row = min(own + wgmma_accumulator_row(thread, 2 * half), length - 1);
      const u32* words =
          p.mask + example * p.mask_example + head * p.mask_head + row * p.mask_row;
      const u32 word = words[4 * block + thread % 4];
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          weights[i + j] = word >> (i / 4 * 2 + j) & 1u ? weights[i + j] : 0.0f;
        }
      }
    }
  }

 private:
  template <class Swizzle, u32 kSlabBytes>
  TRACEA_DEVICE void add_tile(float (&s)[kCount], u32 tile, int thread) const {
    const int lane = thread % kWarpSize, warp = thread / kWarpSize;
    // Of keys: matrices in the order of registers, a row of 8 keys for each query.
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    TRACEA_UNROLL
    for (int block = 0; block < kBlock / 8; block += 2) {
      u32 packed[4];
      if constexpr (kOfKeys) {
        ldmatrix_x4_trans(packed, tile + Swizzle::apply(128 * (8 * block + row) + 16 * chunk));
      } else {
        ldmatrix_x4(packed, tile + block / 8 * kSlabBytes +
                                stmatrix_x4_byte<Swizzle>(thread, block % 8));
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Pair bias = Packed<Element>{packed[i]}.widen();
        float& x = s[4 * block + 2 * i];
        float& y = s[4 * block + 2 * i + 1];
        x = fmaf(x, p.scale, bias.x);
        y = fmaf(y, p.scale, bias.y);
      }
    }
  }

  TRACEA_DEVICE void add_from_memory(float (&s)[kCount], int thread) const {
    const Element* const bias =
        static_cast<const Element*>(p.bias) + example * p.bias_example + head * p.bias_head;
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int row = own + wgmma_accumulator_row(thread, i);
      const int column = other + wgmma_accumulator_col(thread, i);
      const int query = kOfKeys ? column : row, key = kOfKeys ? row : column;
      float one = 0.0f;
      if (query < p.q_len && key < p.kv_len) {
        one = BiasRow<Element, false>{bias + static_cast<i64>(query) * p.bias_row +
                                      (Traits::kBiasKeys ? key : 0)}
                  .one();
      }
      s[i] = fmaf(s[i], p.scale, one);
    }
  }

  TRACEA_DEVICE void add_alibi(float (&s)[kCount], int thread) const {
    const float slope = p.alibi_slopes[head];
    const int column = other + wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = own + wgmma_accumulator_row(thread, 2 * half);
      const int key_ahead = (kOfKeys ? row - column : column - row) - p.ahead;
      const float start = static_cast<float>(key_ahead);
      TRACEA_UNROLL
      for (int i = 2 * half; i < kCount; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float further = static_cast<float>(8 * (i / 4) + j);
          const float ahead = kOfKeys ? start - further : start + further;
          const float distance = Traits::kAlibiLinear ? ahead : -fabsf(ahead);
          s[i + j] = fmaf(slope, distance, s[i + j]);
        }
      }
    }
  }
};

// Numbers of a query, see attention_rows.cuh: exponent, delta, (kSegments) the id, (kBiased)
// the cap.
template <class Traits>
struct QueryPlanes {
  static constexpr int kIds = 2, kCaps = 2 + Traits::kSegments;
  static constexpr int kCount = kCaps + Traits::kBiased;
};

// Those of a thread's two rows.
template <class Traits>
struct QueryNumbers {
  using Planes = QueryPlanes<Traits>;
  float exponent[2], delta[2];
  float cap[Traits::kBiased ? 2 : 1];
  int ids[2];

  // A row behind those of the head has no weight.
  TRACEA_DEVICE void load(const float* rows, i64 heads_before, int padded, int query,
                          int thread) {
    const float* const of_head = rows + heads_before * Planes::kCount * padded;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = query + wgmma_accumulator_row(thread, 2 * half);
      const bool is_query = row < padded;
      const int inside = min(row, padded - 1);
      exponent[half] = is_query ? of_head[row] : __int_as_float(0x7F800000);
      delta[half] = is_query ? of_head[padded + row] : 0.0f;
      if constexpr (Traits::kSegments) {
        ids[half] = __float_as_int(of_head[Planes::kIds * padded + inside]);
      }
      if constexpr (Traits::kBiased) cap[half] = of_head[Planes::kCaps * padded + inside];
    }
  }

  // Scores become weights.
  template <int kCount>
  TRACEA_DEVICE void weigh(float (&s)[kCount], float scale_log2) const {
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      s[i] = ex2_approx(fmaf(s[i], scale_log2, -exponent[i / 2 % 2]));
      if constexpr (Traits::kBiased) s[i] = min_nan(s[i], cap[i / 2 % 2]);
    }
  }
};

// Weights of keys that positions and segments hide become 0. `ids_of` gives the ids of two
// columns, the j-th of each four registers of a row.
template <class Traits, class Interval, class Ids, int kCount>
TRACEA_DEVICE void hide_keys(float (&weights)[kCount], const Interval& keys, int query, int key,
                             const int (&own)[2], int thread, Ids ids_of) {
  const int first = key + wgmma_accumulator_col(thread, 0);
  int begin[2], end[2];
  TRACEA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = query + wgmma_accumulator_row(thread, 2 * half);
    begin[half] = keys.begin(row) - first;
    end[half] = keys.end(row) - first;
  }
  TRACEA_UNROLL
  for (int j = 0; j < kCount / 4; ++j) {
    u32 ids[2] = {};
    if constexpr (Traits::kSegments) ids_of(j, ids);
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * j + i % 2;
      const bool is_seen =
          column < end[i / 2] && (!Traits::kHasLeft || column >= begin[i / 2]) &&
          (!Traits::kSegments || static_cast<int>(ids[i % 2]) == own[i / 2]);
      weights[4 * j + i] = is_seen ? weights[4 * j + i] : 0.0f;
    }
  }
}

// Tiles of a bias in shared memory; nothing if there are none.
template <int kTiles, int kBytes>
struct BiasTiles {
  alignas(1024) u8 bytes[kTiles][kBytes];
};
template <int kTiles>
struct BiasTiles<kTiles, 0> {};

// Calls with each block that the map says is seen, the last one first, and whether scores
// need a look. `words`: of the tile. kWarp: see SegmentMap.
template <bool kWarp, class Visit>
TRACEA_DEVICE void walk_map(const u32* words, const BlockRange& range, Visit one) {
  const auto uniform = [](u32 value) {
    return kWarp ? static_cast<u32>(warp_uniform(static_cast<int>(value))) : value;
  };
  TRACEA_NO_UNROLL
  for (int word = ceil_div(range.last, 32) - 1; 32 * word + 31 >= range.first && word >= 0;
       --word) {
    u32 left = uniform(words[2 * word] & bits_of_range(range.first, range.last, word));
    const u32 full = uniform(words[2 * word + 1]);
    TRACEA_NO_UNROLL
    while (left != 0) {
      const int bit = 31 - __clz(static_cast<int>(left));
      left ^= u32{1} << bit;
      const int block = 32 * word + bit;
      one(block, (full >> bit & 1u) == 0 || !range.is_full(block));
    }
  }
}

}  // namespace tracea
