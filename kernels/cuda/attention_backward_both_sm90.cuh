// attention_backward_both_sm90: all gradients of attention in one launch, on Hopper.
//
// Blocks of threads are those of attention_backward_keys_sm90.cuh and of
// attention_backward_queries_sm90.cuh, which read the same operands. In sections of few heads
// those of keys come first, and leave the operands in L2 for those of queries:
//
//     2 heads of keys, sections of 1, 3 tiles of keys and 2 of queries
//
//     index    0  1  2    3  4    5  6  7    8  9
//     of       keys       queries  keys       queries
//     head     0          0        1          1
//
// Neither kind waits for the other.
#pragma once

#include "attention_backward_keys_sm90.cuh"
#include "attention_backward_queries_sm90.cuh"
#include "tile/common.cuh"

namespace tracea {

struct AttentionBothPlaces {
  int units;    // heads of keys, of all examples
  int section;  // of them
  int keys_tiles, queries_tiles;  // of a unit
};

template <class KeysTraits, class QueriesTraits>
TRACEA_DEVICE void attention_backward_both_sm90(const AttentionKeysParams& keys,
                                                const AttentionQueriesParams& queries,
                                                const AttentionBothPlaces& p) {
  static_assert(KeysTraits::kThreads == QueriesTraits::kThreads, "blocks of one launch");
  const u32 of_section = static_cast<u32>(p.section) * (p.keys_tiles + p.queries_tiles);
  const u32 first = blockIdx.x / of_section * p.section;
  const u32 place = blockIdx.x - first * (p.keys_tiles + p.queries_tiles);
  const u32 units = min(static_cast<u32>(p.section), p.units - first);
  if (place < units * p.keys_tiles) {
    attention_backward_keys_sm90<KeysTraits>(keys, first * p.keys_tiles + place);
  } else {
    attention_backward_queries_sm90<QueriesTraits>(
        queries, first * p.queries_tiles + place - units * p.keys_tiles);
  }
}

}  // namespace tracea
