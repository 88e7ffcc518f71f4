// Tensor memory accelerator: bulk tensor copies of 3-D boxes (PTX ISA,
// "cp.async.bulk.tensor").
//
// Coordinates are in elements, innermost first. What lies outside of the tensor reads as
// zeros, counts as full bytes on the barrier, and is not written by a store.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// CUtensorMap: opaque to the kernel, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

TRACEA_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

TRACEA_DEVICE void cp_async_bulk_tensor_3d(u32 destination, const TensorMap* map, int c0,
                                           int c1, int c2, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}

// Writes the box, and completes its bytes, at the same offsets in every block of `mask`.
TRACEA_DEVICE void cp_async_bulk_tensor_3d_multicast(u32 destination,
                                                     const TensorMap* map, int c0, int c1,
                                                     int c2, u32 barrier, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(mask)
      : "memory");
}

TRACEA_DEVICE void cp_async_bulk_tensor_3d_store(const TensorMap* map, u32 source, int c0,
                                                 int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

TRACEA_DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last `kPending` groups of this thread have read their sources.
template <int kPending>
TRACEA_DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of the copy
// engine and the tensor cores; a barrier must follow.
TRACEA_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tracea
