// A copy by tensor map of four dimensions into several blocks of a cluster. PTX ISA:
// "cp.async.bulk.tensor".
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"

namespace tracea {

// Writes the box, and completes its bytes, at the same offsets in every block of `mask`.
TRACEA_DEVICE void cp_async_bulk_tensor_4d_multicast(u32 destination, const TensorMap* map,
                                                     int c0, int c1, int c2, int c3,
                                                     u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(mask)
      : "memory");
}

}  // namespace tracea
