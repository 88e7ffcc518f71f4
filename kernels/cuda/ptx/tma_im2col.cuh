// Bulk tensor copies of the pixels that a filter tap sees (PTX ISA, "cp.async.bulk.tensor",
// im2col mode); see tma.cuh.
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"

namespace tracea {

// Copies channels from `c` on of consecutive positions, the first of which is (w, h) of
// image n, each moved by the tap's offset. The map says how many, and how positions follow
// one another. Offsets are not negative; what lies outside of an image reads as zeros.
TRACEA_DEVICE void cp_async_bulk_tensor_4d_im2col(u32 destination, const TensorMap* map,
                                                  int c, int w, int h, int n, u16 offset_w,
                                                  u16 offset_h, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(destination),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"(offset_w), "h"(offset_h)
      : "memory");
}

}  // namespace tracea
