// Both halves of a barrier of a cluster (PTX ISA, "barrier.cluster").
#pragma once

#include "tile/common.cuh"

namespace tracea {

// What the thread did before is seen by those of the cluster that wait.
TRACEA_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
TRACEA_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace tracea
