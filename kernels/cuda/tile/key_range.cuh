// Which blocks of keys a tile of queries sees, from rules on positions: an interval of keys
// for each query, whose ends only grow.
//
//     query i sees keys j with   i - left <= j <= i + right   and   j < limit
//
//            keys ->        n0            n1
//     first query  . . . . [=============)                  blocks
//                  . . . . . . . . . . . .                  first .. full_first  partial
//     last query   . . . . . . . [=============)            full_first .. full_last  full
//                                                           full_last .. last  partial
//
// A query that sees no key takes the mean of all values, as softmax of equal scores does.
// A tile with such a query sees all blocks, each partial.
//
// tracea_jax/ir/tile_graph.py is the same algebra in Python, and proves it.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Blocks [first, last), of which [full_first, full_last) need no mask.
struct BlockRange {
  int first, last, full_first, full_last;

  TRACEA_HOST_DEVICE constexpr int count() const { return last - first; }
  TRACEA_HOST_DEVICE constexpr bool is_full(int block) const {
    return block >= full_first && block < full_last;
  }
};

// The rule for one example. A side that does not limit is not looked at.
template <bool kHasLeft, bool kHasRight>
struct KeyInterval {
  int kv_len;       // keys that are stored
  int limit;        // of them, those that may be seen
  int left, right;

  // The first key that a query sees, and the one behind the last.
  TRACEA_HOST_DEVICE constexpr int begin(int query) const {
    return kHasLeft && query > left ? query - left : 0;
  }
  TRACEA_HOST_DEVICE constexpr int end(int query) const {
    return kHasRight && query + right + 1 < limit ? query + right + 1 : limit;
  }

  // Whether a query of first .. last sees no key: if any does, one at an end does.
  TRACEA_HOST_DEVICE constexpr bool has_blind(int first, int last) const {
    return end(first) <= begin(first) || end(last) <= begin(last);
  }

  TRACEA_HOST_DEVICE constexpr BlockRange blocks(int first, int last, int block) const {
    if (has_blind(first, last)) return {0, ceil_div(kv_len, block), 0, 0};
    return seen_blocks(first, last, block);
  }

  // The same, if queries that see no key are looked after in another way.
  TRACEA_HOST_DEVICE constexpr BlockRange seen_blocks(int first, int last, int block) const {
    if (end(last) <= begin(first)) return {0, 0, 0, 0};
    const int from = begin(first) / block, to = ceil_div(end(last), block);
    const int full_from = ceil_div(begin(last), block), full_to = end(first) / block;
    if (full_from >= full_to) return {from, to, from, from};
    return {from, to, full_from, full_to};
  }
};

}  // namespace tracea
