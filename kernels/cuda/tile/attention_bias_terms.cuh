// What both roles of attention_backward_bias_sm90 walk, in the same order: the tiles of the
// gradient that a block of threads owns, and the terms that each is summed over.
//
//     a tile      a place in all axes of the bias, and a part of the terms
//     its terms   tiles of scores at that place, anywhere in the axes that are shared; none
//                 of which rules on positions, lengths or the map say that nothing is seen
#pragma once

#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "tile/attention_blocks.cuh"
#include "tile/common.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/key_range.cuh"

namespace tracea {

struct AttentionBiasParams {
  const TensorMap *q, *k, *v, *d_out;  // see attention_sm90.cuh
  const TensorMap* bias;               // (keys, queries, heads, examples), or null
  const float* rows;                   // (batch, heads, planes, padded)
  const int* q_lengths;                // (batch), or null
  const int* kv_lengths;               // (batch), or null
  const int* segments;                 // of keys, (batch, padded_kv), or null
  void* gradient;  // (parts, examples, heads, q_len or kTileQ, kv_len or kTileKv)
  int batch, q_len, kv_len, heads, padded, padded_kv;
  int group;        // heads that share keys and values
  int left, right;  // of the window; not looked at if there is no limit
  int parts;
  int pairs;         // of tiles, of all parts
  float scale_log2;  // log2(e), or cap log2(e)
  float to_cap;      // 1 / cap
  GradientScoresParams scores;
};

// One tile of scores that is summed; also what a tile of the gradient owns, with 0 for an
// axis that is shared.
struct AttentionBiasTerm {
  int tile, block, head, example, part;
};

template <class Traits>
struct AttentionBiasTerms {
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;
  using Term = AttentionBiasTerm;
  static constexpr int kTileQ = Traits::kTileQ, kTileKv = Traits::kTileKv;

  const AttentionBiasParams& p;
  int tiles, blocks;  // of queries and of keys, of a head

  TRACEA_DEVICE explicit AttentionBiasTerms(const AttentionBiasParams& params)
      : p(params),
        tiles(ceil_div(params.q_len, kTileQ)),
        blocks(ceil_div(params.kv_len, kTileKv)) {}

  // The last digit of an index, and the index without it; none if the axis is no digit.
  template <bool kIs>
  TRACEA_DEVICE static int take(u32& index, int count) {
    if constexpr (!kIs) return 0;
    const u32 rest = index / static_cast<u32>(count);
    const int digit = static_cast<int>(index - rest * static_cast<u32>(count));
    index = rest;
    return digit;
  }

  // Calls with each tile of the block of threads.
  template <class Visit>
  TRACEA_DEVICE void walk_tiles(Visit one) const {
    const u32 of_head = static_cast<u32>(Traits::kBiasKeys ? blocks : 1) *
                        static_cast<u32>(Traits::kBiasQueries ? tiles : 1);
    const u32 half = (of_head + 1) / 2;
    TRACEA_NO_UNROLL
    for (u32 i = 2 * blockIdx.x; i < 2 * static_cast<u32>(p.pairs);
         i += i % 2 == 0 ? 1 : 2 * gridDim.x - 1) {
      const u32 head = i / 2 / half, first = i / 2 - head * half;
      const u32 opposite = of_head - 1 - first;
      if (i % 2 == 0) {
        one(tile_at(head, first));
      } else if (opposite != first) {
        one(tile_at(head, opposite));
      }
    }
  }

  TRACEA_DEVICE Term tile_at(u32 above, u32 index) const {
    Term own;
    own.block = take<Traits::kBiasKeys>(index, blocks);
    own.tile = static_cast<int>(index);
    own.head = take<Traits::kBiasHeads>(above, p.heads);
    own.example = take<Traits::kBiasExamples>(above, p.batch);
    own.part = static_cast<int>(above);
    return own;
  }

  TRACEA_DEVICE Interval keys(int example) const {
    const int limit = positions<Traits::kKvLengths>(p.kv_lengths, example, p.kv_len);
    return {p.kv_len, limit, p.left, p.right};
  }

  // Whether queries of a term see keys of it, in bit 0; in bit 1, whether all see all.
  TRACEA_DEVICE int state(const Term& term) const {
    const int count = positions<Traits::kQLengths>(p.q_lengths, term.example, p.q_len);
    const int first = term.tile * kTileQ;
    if (first >= count) return 0;
    const BlockRange range = keys(term.example).seen_blocks(
        first, min(first + kTileQ, count) - 1, kTileKv);
    bool is_seen = term.block >= range.first && term.block < range.last;
    bool is_full = range.is_full(term.block);
    if constexpr (Traits::kMapped) {
      const GradientScoresParams& of = p.scores;
      const u32* words = of.map + term.example * of.map_example + term.head * of.map_head +
                         (term.tile * ceil_div(blocks, 32) + term.block / 32) * 2;
      const int bit = term.block % 32;
      is_seen = is_seen && (words[0] >> bit & 1u) != 0;
      is_full = is_full && (words[1] >> bit & 1u) != 0;
    }
    return is_seen | is_full << 1;
  }

  // Calls with each term of a tile of which anything is seen, and whether scores need a
  // look. kWarp: all threads of a warp do, and the compiler shall know that they do the same.
  template <bool kWarp, class Visit>
  TRACEA_DEVICE void walk(const Term& own, Visit one) const {
    const i64 all = static_cast<i64>(Traits::kBiasKeys ? 1 : blocks) *
                    (Traits::kBiasQueries ? 1 : tiles) * (Traits::kBiasHeads ? 1 : p.heads) *
                    (Traits::kBiasExamples ? 1 : p.batch);
    const u32 end = static_cast<u32>(all * (own.part + 1) / p.parts);
    TRACEA_NO_UNROLL
    for (u32 i = static_cast<u32>(all * own.part / p.parts); i < end; ++i) {
      u32 index = i;
      Term term = own;
      if constexpr (!Traits::kBiasKeys) term.block = take<true>(index, blocks);
      if constexpr (!Traits::kBiasQueries) term.tile = take<true>(index, tiles);
      if constexpr (!Traits::kBiasHeads) term.head = take<true>(index, p.heads);
      if constexpr (!Traits::kBiasExamples) term.example = static_cast<int>(index);
      int found = state(term);
      if constexpr (kWarp) found = warp_uniform(found);
      if (found & 1) one(term, (found & 2) == 0);
    }
  }
};

}  // namespace tracea
