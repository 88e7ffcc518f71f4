// Order of the tiles of attention: heads in sections whose keys and values fit into L2
// together. In a section the tiles with most work come first, those of all its heads:
//
//     2 tiles of each of 3 heads, sections of 2, later queries see more keys
//
//     index    0  1  2  3    4  5
//     head     0  1  0  1    2  2
//     tile     1  1  0  0    1  0
#pragma once

#include "tile/common.cuh"

namespace tracea {

// A tile of queries, the first of them `query`.
struct AttentionTile {
  int query, head, example;
};

// Which tile is the `index`-th.
struct AttentionOrder {
  int tiles_q, heads, batch, section;
  bool long_last;  // whether later queries see more keys
  bool examples_first = false;  // whether a head of all examples comes before the next

  TRACEA_HOST_DEVICE constexpr AttentionTile at(u32 index, int tile_q) const {
    const u32 all = static_cast<u32>(heads) * batch;
    const u32 first = index / (static_cast<u32>(section) * tiles_q) * section;
    const u32 count = all - first < static_cast<u32>(section) ? all - first : section;
    const u32 local = index - first * tiles_q;
    const u32 rank = local / count;
    const u32 head = first + local - rank * count;
    const int row = static_cast<int>(long_last ? tiles_q - 1 - rank : rank);
    const u32 inner = examples_first ? batch : heads;
    const int low = static_cast<int>(head % inner), high = static_cast<int>(head / inner);
    if (examples_first) return {row * tile_q, high, low};
    return {row * tile_q, low, high};
  }
};

}  // namespace tracea
