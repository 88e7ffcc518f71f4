// Bulk tensor copies of 4-D boxes; see tma.cuh.
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE void cp_async_bulk_tensor_4d(u32 destination, const TensorMap* map, int c0,
                                           int c1, int c2, int c3, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// How L2 keeps what is read once: not longer than anything else.
TRACEA_DEVICE u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

TRACEA_DEVICE void cp_async_bulk_tensor_4d_hinted(u32 destination, const TensorMap* map,
                                                  int c0, int c1, int c2, int c3,
                                                  u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

TRACEA_DEVICE void cp_async_bulk_tensor_4d_store(const TensorMap* map, u32 source, int c0,
                                                 int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace tracea
