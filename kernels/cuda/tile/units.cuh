// Units of 16 bytes that lie across two others: rows that start anywhere in memory, and memory
// takes and gives 16 bytes at a time only where they are aligned.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// 16 of the 32 bytes of two units, from byte `first` < 16 on.
TRACEA_DEVICE Words straddling(const Words& low, const Words& high, u32 first) {
  u32 w[8] = {low.w[0],  low.w[1],  low.w[2],  low.w[3],
              high.w[0], high.w[1], high.w[2], high.w[3]};
  TRACEA_UNROLL
  for (int i = 0; i < 6; ++i) w[i] = first & 8 ? w[i + 2] : w[i];
  TRACEA_UNROLL
  for (int i = 0; i < 5; ++i) w[i] = first & 4 ? w[i + 1] : w[i];
  Words found;
  TRACEA_UNROLL
  for (int i = 0; i < 4; ++i) found.w[i] = __funnelshift_r(w[i], w[i + 1], 8 * (first & 3));
  return found;
}

}  // namespace tracea
