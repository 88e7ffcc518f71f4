// Bulk copies and additions from shared to global memory, and counters by which blocks take
// turns at them (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "red", "fence.proxy").
//
// Addresses and sizes are multiples of 16 bytes. See tma.cuh for groups of bulk copies.
#pragma once

#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE void cp_async_bulk_store(float* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}

// Adds float32 to float32, each element at once, in no order.
TRACEA_DEVICE void cp_reduce_async_bulk_add(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::
                   "l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}

// Waits until all groups of this thread have been written.
TRACEA_DEVICE void cp_async_bulk_wait_group_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders accesses of global memory by the copy engine and by ordinary instructions.
TRACEA_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// What other blocks wrote before they released the counter is seen after.
TRACEA_DEVICE int ld_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

TRACEA_DEVICE void add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value)
               : "memory");
}

}  // namespace tracea
