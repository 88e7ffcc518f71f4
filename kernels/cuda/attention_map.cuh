// attention_map: which blocks of keys each tile of queries sees, where only the device knows:
// from segment ids and from a boolean mask. tile/block_map.cuh says what the words of the
// map mean, and reads them.
//
//     segments          by the least and the largest id: ranges apart are not seen, all
//                       four numbers equal are full
//     mask of blocks    that tiles divide: an entry says it all
//     mask of scores    all of its entries are read; beside the map come words with a bit
//                       for each entry, as threads of attention_sm90 read them
//
// Without a mask of scores a thread block finds what 32 blocks of keys are to 32 tiles, a
// lane to each block, a warp to each tile. With one it does so for a single tile, a warp to
// each block.
//
// It also starts the counter of drawn tiles.
#pragma once

#include "tile/common.cuh"
#include "tile/segment_map.cuh"

namespace tracea {

struct AttentionMapParams {
  const int* q_segments;   // (batch, q_len), or null
  const int* kv_segments;  // (batch, kv_len), or null
  const u8* mask;          // (1 or batch, 1 or heads, entries of queries, of keys), or null
  u32* map;                // (1 or batch, 1 or heads, tiles, words, 2)
  u32* mask_words;         // (as mask, as mask, 1 or q_len, blocks, 4), or null
  u32* counter;            // null unless tiles are drawn
  int q_len, kv_len;
  int heads;                    // of the map
  int block_queries, block_kv;  // that an entry of the mask stands for
  int mask_row, mask_key;       // entries from one query and key to the next, 0 if shared
  i64 mask_example, mask_head;  // likewise
};

enum class MapMask { kNone, kBlocks, kScores };

// The least and the largest of the ids of `kCount` positions from `first` on, in each lane
// of the warp. A span of no position meets none.
template <int kCount>
TRACEA_DEVICE SegmentSpan span_of(const int* ids, int first, int length) {
  constexpr int kLeast = -2147483647 - 1, kLargest = 2147483647;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int low = kLargest, high = kLeast;
  TRACEA_UNROLL
  for (int i = 0; i < ceil_div(kCount, kWarpSize); ++i) {
    const int place = i * kWarpSize + lane;
    if (place < kCount && first + place < length) {
      const int id = ids[first + place];
      low = min(low, id);
      high = max(high, id);
    }
  }
  return {__reduce_min_sync(0xFFFFFFFFu, low), __reduce_max_sync(0xFFFFFFFFu, high)};
}

TRACEA_DEVICE bool meets(SegmentSpan a, SegmentSpan b) {
  return a.low <= b.high && b.low <= a.high;
}
TRACEA_DEVICE bool is_one(SegmentSpan a, SegmentSpan b) {
  return a.low == b.high && b.low == a.high;
}

template <class Traits>
struct AttentionMap {
  static constexpr int kTileQ = Traits::kTileQ, kTileKv = Traits::kTileKv;
  static constexpr int kWarps = kWarpSize;  // of a thread block, and blocks of a word
  static constexpr int kTogether = 8;       // rows whose entries are on their way
  static constexpr int kTiles = Traits::kMask == MapMask::kScores ? 1 : kWarps;  // of a group
  static constexpr u32 kAll = 0xFFFFFFFFu;

  static_assert(Traits::kMask != MapMask::kScores || (kTileKv <= 128 && kTileKv % 8 == 0),
                "a lane has four keys of a row");

  const AttentionMapParams& p;
  const int lane, warp;
  const int blocks, words, tiles;  // of a head
  int word, group;                 // of blocks, and of tiles
  int above;                       // heads of the map before this one
  int example, head;               // of the map

  TRACEA_DEVICE explicit AttentionMap(const AttentionMapParams& params)
      : p(params),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        warp(static_cast<int>(threadIdx.x) / kWarpSize),
        blocks(ceil_div(params.kv_len, kTileKv)),
        words(ceil_div(blocks, 32)),
        tiles(ceil_div(params.q_len, kTileQ)) {
    const int groups = ceil_div(tiles, kTiles);
    word = static_cast<int>(blockIdx.x) % words;
    group = static_cast<int>(blockIdx.x) / words % groups;
    above = static_cast<int>(blockIdx.x) / words / groups;
    example = above / p.heads;
    head = above % p.heads;
  }

  TRACEA_DEVICE SegmentSpan span_of_queries(int tile) const {
    return span_of<kTileQ>(p.q_segments + static_cast<i64>(example) * p.q_len,
                           tile * kTileQ, p.q_len);
  }
  TRACEA_DEVICE SegmentSpan span_of_keys(int block) const {
    return span_of<kTileKv>(p.kv_segments + static_cast<i64>(example) * p.kv_len,
                            block * kTileKv, p.kv_len);
  }

  TRACEA_DEVICE const u8* mask_of_head() const {
    return p.mask + example * p.mask_example + head * p.mask_head;
  }

  TRACEA_DEVICE void write(int tile, u32 seen, u32 full) const {
    u32* to = p.map + ((static_cast<i64>(above) * tiles + tile) * words + word) * 2;
    to[0] = seen;
    to[1] = full;
  }

  // Tiles 32 group .. + 31, blocks 32 word .. + 31.
  TRACEA_DEVICE void of_tiles(SegmentSpan* spans) const {
    const int tile = kWarps * group + warp, block = 32 * word + lane;
    SegmentSpan own{};
    if constexpr (Traits::kSegments) {
      own = span_of_queries(tile);
      spans[warp] = span_of_keys(32 * word + warp);
    }
    __syncthreads();
    if (tile >= tiles) return;
    bool is_seen = block < blocks, is_full = is_seen;
    if constexpr (Traits::kSegments) {
      is_seen = is_seen && meets(own, spans[lane]);
      is_full = is_seen && is_one(own, spans[lane]);
    }
    if constexpr (Traits::kMask == MapMask::kBlocks) {
      const int entry = min(block, blocks - 1) * kTileKv / p.block_kv;
      const i64 row = tile * kTileQ / p.block_queries;
      const bool is_allowed = mask_of_head()[row * p.mask_row + entry * p.mask_key] != 0;
      is_seen = is_seen && is_allowed;
      is_full = is_full && is_allowed;
    }
    const u32 seen = __ballot_sync(kAll, is_seen), full = __ballot_sync(kAll, is_full);
    if (lane == 0) write(tile, seen, full);
  }

  // What the mask says of four keys from `key` on, in the low bit of a byte each, and
  // nothing of keys that do not exist.
  TRACEA_DEVICE u32 four(const u8* mask, int row, int key, int end) const {
    if constexpr (Traits::kWhole) {  // rows of whole words
      const i64 at = static_cast<i64>(row) * p.mask_row + key;
      return key < end ? *reinterpret_cast<const u32*>(mask + at) : 0u;
    }
    const int block_queries = Traits::kOfOne ? 1 : p.block_queries;
    const int block_kv = Traits::kOfOne ? 1 : p.block_kv;
    const u8* start = mask + static_cast<i64>(row / block_queries) * p.mask_row;
    u32 found = 0;
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (key + i >= end) break;
      found |= static_cast<u32>(start[(key + i) / block_kv * p.mask_key]) << 8 * i;
    }
    return found;
  }

  // One tile, blocks 32 word .. + 31.
  TRACEA_DEVICE void of_scores(u32* found) const {
    const int tile = group, block = 32 * word + warp, first = tile * kTileQ;
    const int start = block * kTileKv, key = start + 4 * lane;
    const int end = min(start + kTileKv, p.kv_len);
    const bool is_shared = p.mask_row == 0;  // by all queries
    const int rows = is_shared ? 1 : min(kTileQ, p.q_len - first);
    const bool writes = (p.mask_example != 0 || example == 0) && (!is_shared || tile == 0);
    // Bit l of number i: whether the i-th key of lane l exists; whether the tile has it.
    u32 exists[4], some[4], every[4];
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      exists[i] = __ballot_sync(kAll, key + i < end);
      some[i] = 0;
      every[i] = kAll;
    }
    constexpr u32 kInside = kTileKv == 128 ? kAll : (u32{1} << kTileKv / 4) - 1;
    const u8* mask = mask_of_head();
    const i64 before = p.mask_example != 0 ? above : head;  // heads of the mask
    u32* words_of_head = p.mask_words + before * (is_shared ? 1 : p.q_len) * blocks * 4;
    TRACEA_NO_UNROLL
    for (int from = 0; from < rows; from += kTogether) {
      u32 bytes[kTogether];
      TRACEA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        bytes[i] = from + i < rows ? four(mask, first + from + i, key, end) : 0u;
      }
      TRACEA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (from + i >= rows) break;
        u32 bits[4];
        TRACEA_UNROLL
        for (int j = 0; j < 4; ++j) {
          bits[j] = __ballot_sync(kAll, bytes[i] >> 8 * j & 1u);
          some[j] |= bits[j];
          bits[j] |= ~exists[j];
          every[j] &= bits[j];
          bits[j] &= kInside;
        }
        if (writes && lane == 0 && block < blocks) {
          const i64 row = is_shared ? 0 : first + from + i;
          *reinterpret_cast<Words*>(words_of_head + (row * blocks + block) * 4) =
              by_lane(bits);
        }
      }
    }
    bool is_seen = (some[0] | some[1] | some[2] | some[3]) != 0;
    bool is_full = is_seen && (every[0] & every[1] & every[2] & every[3]) == kAll;
    if constexpr (Traits::kSegments) {
      const SegmentSpan own = span_of_queries(tile), theirs = span_of_keys(block);
      is_seen = is_seen && meets(own, theirs);
      is_full = is_full && is_one(own, theirs);
    }
    if (lane == 0) found[warp] = is_seen | is_full << 1;
    __syncthreads();
    if (warp != 0) return;
    const u32 state = found[lane];
    const u32 seen = __ballot_sync(kAll, state & 1u), full = __ballot_sync(kAll, state & 2u);
    if (lane == 0) write(tile, seen, full);
  }

  // Of the entries of a row, bit l of number i that of key 4 l + i, the words of the four
  // lanes of attention that share the row: bits 2 j and 2 j + 1 of word t are those of keys
  // 8 j + 2 t and the next.
  TRACEA_DEVICE static Words by_lane(const u32 (&bits)[4]) {
    constexpr u32 kEven = 0x55555555u;
    Words found;
    TRACEA_UNROLL
    for (int t = 0; t < 4; ++t) {
      const u32 low = bits[t % 2 * 2] >> t / 2 & kEven;
      const u32 high = bits[t % 2 * 2 + 1] >> t / 2 & kEven;
      found.w[t] = low | high << 1;
    }
    return found;
  }
};

template <class Traits>
TRACEA_DEVICE void attention_map(const AttentionMapParams& p) {
  __shared__ SegmentSpan shared[kWarpSize];
  if (p.counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
  const AttentionMap<Traits> map(p);
  if constexpr (Traits::kMask == MapMask::kScores) {
    map.of_scores(reinterpret_cast<u32*>(shared));
  } else {
    map.of_tiles(shared);
  }
}

}  // namespace tracea
