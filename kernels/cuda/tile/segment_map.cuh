// Which blocks a tile sees where queries and keys have segment ids: from the least and the
// largest id of each tile and block.
//
//     ranges apart                    empty     no id is in both
//     all four numbers are equal      full      there is but one id
//     else                            partial   ids are compared one by one
//
// A block that positions leave partial stays so. One warp makes the map, a bit for a block,
// and one of its threads walks it, as often as it needs to.
#pragma once

#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/key_range.cuh"

namespace tracea {

// The least and the largest id of a tile or block.
struct alignas(8) SegmentSpan {
  int low, high;
};

template <int kMostBlocks>
struct SegmentMap {
  static constexpr int kWords = kMostBlocks / 32;
  u32 seen[kWords], full[kWords];
  int count;  // of blocks that are seen

  // Of the blocks in the range. All threads of one warp.
  TRACEA_DEVICE void fill(const BlockRange& range, SegmentSpan own,
                          const SegmentSpan* blocks) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int sum = 0;
    TRACEA_NO_UNROLL
    for (int word = range.first / 32; word < ceil_div(range.last, 32); ++word) {
      const int block = 32 * word + lane;
      bool is_seen = false, is_full = false;
      if (block >= range.first && block < range.last) {
        const SegmentSpan span = blocks[block];
        is_seen = span.low <= own.high && own.low <= span.high;
        is_full = is_seen && span.low == span.high && own.low == own.high &&
                  range.is_full(block);
      }
      const u32 bits = __ballot_sync(0xFFFFFFFFu, is_seen);
      sum += __popc(bits);
      seen[word] = bits;  // by all lanes: the same
      full[word] = __ballot_sync(0xFFFFFFFFu, is_full);
    }
    count = sum;
    __syncwarp();
  }

  // Calls with each block of the range that is seen, and whether it is partial.
  template <class Visit>
  TRACEA_DEVICE void walk(const BlockRange& range, Visit one) const {
    int left = count;
    TRACEA_NO_UNROLL
    for (int word = range.first / 32; left > 0; ++word) {
      u32 bits = seen[word];
      TRACEA_NO_UNROLL
      for (; bits != 0; bits &= bits - 1) {
        const int bit = __ffs(static_cast<int>(bits)) - 1;
        one(32 * word + bit, (full[word] >> bit & 1) == 0);
        --left;
      }
    }
  }
};

// The same for rules on positions alone.
template <class Visit>
TRACEA_DEVICE void walk_range(const BlockRange& range, Visit one) {
  TRACEA_NO_UNROLL
  for (int block = range.first; block < range.last; ++block) {
    one(block, !range.is_full(block));
  }
}

// What consumers must know of a block, in a word.
struct BlockCode {
  u32 word;

  TRACEA_HOST_DEVICE static constexpr BlockCode of(int block, bool is_partial, bool is_first,
                                                   bool is_last) {
    return {static_cast<u32>(block) << 3 | static_cast<u32>(is_first) << 2 |
            static_cast<u32>(is_partial) << 1 | static_cast<u32>(is_last)};
  }
  TRACEA_HOST_DEVICE constexpr int block() const { return static_cast<int>(word >> 3); }
  TRACEA_HOST_DEVICE constexpr bool is_first() const { return (word & 4) != 0; }
  TRACEA_HOST_DEVICE constexpr bool is_partial() const { return (word & 2) != 0; }
  TRACEA_HOST_DEVICE constexpr bool is_last() const { return (word & 1) != 0; }
};

}  // namespace tracea
