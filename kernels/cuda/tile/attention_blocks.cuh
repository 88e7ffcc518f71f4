// What blocks of threads of attention's backward kernels have alike: one thread copies
// operands into rings of shared memory, and warpgroups multiply them.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"

namespace tracea {

// Waits until the barrier has left the phase of this parity.
TRACEA_DEVICE void wait_for(const u64& barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(shared_address(&barrier), parity)) {
  }
}

// Positions of an example that count: all, or (kHasLengths) as many as it says.
template <bool kHasLengths>
TRACEA_DEVICE int positions(const int* lengths, int example, int all) {
  return kHasLengths ? min(max(lengths[example], 0), all) : all;
}

// The block's shared memory.
template <class Shared>
TRACEA_DEVICE Shared& shared_memory() {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();
  return *reinterpret_cast<Shared*>(smem_bytes);
}

// One thread of the first warpgroup produces, the other warpgroups consume. The first's other
// warps help: `help` is called with each warp's number.
template <class Traits, class Kernel, class Help>
TRACEA_DEVICE void run_roles(const Kernel& kernel, Help help) {
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (warp == 0 && elect_one()) kernel.produce();
    help(warp);
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

template <class Traits, class Kernel>
TRACEA_DEVICE void run_roles(const Kernel& kernel) {
  run_roles<Traits>(kernel, [](int) {});
}

}  // namespace tracea
