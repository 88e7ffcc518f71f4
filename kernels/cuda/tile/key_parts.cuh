// The blocks of keys of one sequence, dealt out to thread blocks in contiguous parts that
// differ by one block at most:
//
//     count = 7, parts = 3     [0 1)[2 3)[4 5 6)
//
// No part has fewer than kFewestBlocks if there are several: for so little work a thread
// block of its own does not pay. The parts that are left over are empty.
#pragma once

#include "tile/common.cuh"

namespace tracea {

constexpr int kFewestBlocks = 2;

struct KeyPart {
  int first, last;
};

// Part `index` of at most `parts`, of `count` blocks.
TRACEA_HOST_DEVICE constexpr KeyPart key_part(int count, int index, int parts) {
  const int most = count <= kFewestBlocks ? 1 : count / kFewestBlocks;
  const int used = parts < most ? parts : most;
  if (index >= used) return {count, count};
  return {static_cast<int>(static_cast<i64>(count) * index / used),
          static_cast<int>(static_cast<i64>(count) * (index + 1) / used)};
}

}  // namespace tracea
