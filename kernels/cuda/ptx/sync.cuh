// Warp election, named barriers, clusters and register budgets.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// True in exactly one lane of a converged warp, always the same one. Unlike `lane == 0`
// the compiler knows this and issues bulk copies without a loop over lanes.
TRACEA_DEVICE bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected)
      :
      : "memory");
  return elected != 0;
}

// The value of lane 0, which the compiler then knows to be equal in all lanes.
TRACEA_DEVICE int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// Barrier 1 or 2 among the 128 threads of a warpgroup; constants, as a run-time name makes
// the compiler reserve all sixteen.
TRACEA_DEVICE void warpgroup_barrier(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// Barrier 3 among all consumers.
template <int kThreads>
TRACEA_DEVICE void consumers_barrier() {
  asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory");
}

TRACEA_DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; orders shared memory among them.
TRACEA_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Every warp of a warpgroup executes these; multiples of 8 in 24..256.
template <int kRegisters>
TRACEA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TRACEA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tracea
