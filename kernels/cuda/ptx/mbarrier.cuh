// mbarrier: transaction barriers in shared memory (PTX ISA, "mbarrier").
//
// Addresses are 32-bit shared-window addresses, see shared_address.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// The shared-window address of an object in shared memory.
TRACEA_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

TRACEA_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the cluster and to the copy engine, once a
// (cluster) barrier follows.
TRACEA_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces bytes that copies will complete in this phase.
TRACEA_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

TRACEA_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival at the barrier of the same address in block `rank` of the cluster. It orders
// nothing between the blocks: cluster scope would cost a fence of the whole GPU, and who
// has only read has nothing to publish.
TRACEA_DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// True once the phase of this parity is complete; may suspend the thread for a while.
TRACEA_DEVICE bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace tracea
