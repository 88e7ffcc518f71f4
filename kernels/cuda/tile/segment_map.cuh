// Which blocks a tile sees where queries and keys have segment ids: from the least and the
// largest id of each tile and block.
//
//     ranges apart                    empty     no id is in both
//     all four numbers are equal      full      there is but one id
//     else                            partial   ids are compared one by one
//
// A block that positions leave partial stays so. The map is made once, by all threads, a bit
// for a block; then each role walks it as often as it needs to.
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
  u32 bits[2][kWords];  // of partial, and of full blocks
  int counts[2];

  // Of the blocks in the range; whether there are any. All threads of the block.
  TRACEA_DEVICE bool fill(const BlockRange& range, SegmentSpan own,
                          const SegmentSpan* blocks) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
    __syncthreads();
    for (int word = range.first / 32 + warp; word < ceil_div(range.last, 32);
         word += static_cast<int>(blockDim.x) / kWarpSize) {
      const int block = 32 * word + lane;
      bool is_seen = false, is_full = false;
      if (block >= range.first && block < range.last) {
        const SegmentSpan span = blocks[block];
        is_seen = span.low <= own.high && own.low <= span.high;
        is_full = is_seen && span.low == span.high && own.low == own.high &&
                  range.is_full(block);
      }
      const u32 seen = __ballot_sync(0xFFFFFFFFu, is_seen);
      const u32 full = __ballot_sync(0xFFFFFFFFu, is_full);
      if (lane == 0) {
        bits[0][word] = seen & ~full;
        bits[1][word] = full;
        atomicAdd(&counts[0], __popc(seen & ~full));
        atomicAdd(&counts[1], __popc(full));
      }
    }
    __syncthreads();
    return warp_uniform(counts[0] + counts[1]) > 0;
  }

  // Calls with each block of the range: first those that are partial, then the full ones.
  // kWarp: all threads of a warp do, and the compiler shall know that they do the same.
  template <bool kWarp, class Partial, class Full>
  TRACEA_DEVICE void walk(const BlockRange& range, Partial of_partial, Full of_full) const {
    visit<kWarp>(0, range.first / 32, of_partial);
    visit<kWarp>(1, range.first / 32, of_full);
  }

  // See walk_range_back.
  template <bool kWarp, class Visit>
  TRACEA_DEVICE void walk_back(const BlockRange& range, Visit one) const {
    u32 left = 0, partial = 0;
    int word = ceil_div(range.last, 32);
    TRACEA_NO_UNROLL
    for (int count = uniform<kWarp>(counts[0] + counts[1]); count > 0; --count) {
      while (left == 0) {
        --word;
        partial = bits[0][word];
        left = partial | bits[1][word];
      }
      const u32 bit = 31 - __clz(static_cast<int>(left));
      one(uniform<kWarp>(32 * word + bit), uniform<kWarp>(partial >> bit & 1) != 0);
      left &= ~(1u << bit);
    }
  }

 private:
  template <bool kWarp>
  TRACEA_DEVICE static int uniform(int value) {
    return kWarp ? warp_uniform(value) : value;
  }

  template <bool kWarp, class Visit>
  TRACEA_DEVICE void visit(int kind, int word, Visit one) const {
    u32 left = 0;
    --word;
    TRACEA_NO_UNROLL
    for (int count = uniform<kWarp>(counts[kind]); count > 0; --count) {
      while (left == 0) left = bits[kind][++word];
      one(uniform<kWarp>(32 * word + __ffs(static_cast<int>(left)) - 1));
      left &= left - 1;
    }
  }
};

// The same for rules on positions alone.
template <class Partial, class Full>
TRACEA_DEVICE void walk_range(const BlockRange& range, Partial of_partial, Full of_full) {
  int block = range.first;
  TRACEA_NO_UNROLL
  for (; block < range.full_first; ++block) of_partial(block);
  TRACEA_NO_UNROLL
  for (; block < range.full_last; ++block) of_full(block);
  TRACEA_NO_UNROLL
  for (; block < range.last; ++block) of_partial(block);
}

// Calls with each block, the last one first, and whether it is partial: one loop, for calls
// that are too large to be there twice.
template <class Visit>
TRACEA_DEVICE void walk_range_back(const BlockRange& range, Visit one) {
  TRACEA_NO_UNROLL
  for (int block = range.last - 1; block >= range.first; --block) {
    one(block, !range.is_full(block));
  }
}

}  // namespace tracea
