// Bulk tensor copies from memory into L2, which nobody waits for.
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE void prefetch_bulk_tensor_4d(const TensorMap* map, int c0, int c1, int c2,
                                           int c3) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The cache line of an address, into L1.
TRACEA_DEVICE void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

}  // namespace tracea
