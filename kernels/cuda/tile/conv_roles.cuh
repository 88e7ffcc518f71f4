// How the blocks of convolutions for Hopper share their work: the first warpgroup copies, with
// one thread for each task, and the others multiply, round a ring of stages in shared memory.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

TRACEA_DEVICE void wait_parity(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// The barriers of a ring; see tile/pipeline.cuh for their parities.
template <int kStages>
struct RingBarriers {
  using State = PipelineState<kStages>;
  u64 full[kStages];
  u64 empty[kStages];

  // One thread, before a fence and a barrier of the block.
  TRACEA_DEVICE void initialize(int consumers, int cluster = 1) {
    TRACEA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&full[i]), full_arrivals());
      mbarrier_init(shared_address(&empty[i]), empty_arrivals(consumers, cluster));
    }
  }

  // Waits until a stage has been read, and returns what completes when `bytes` are copied.
  TRACEA_DEVICE u32 refill(const State& state, u32 bytes) {
    const u32 barrier = shared_address(&full[state.stage_idx]);
    wait_parity(shared_address(&empty[state.stage_idx]), state.producer_parity());
    mbarrier_arrive_expect_tx(barrier, bytes);
    return barrier;
  }

  TRACEA_DEVICE void wait(const State& state) {
    wait_parity(shared_address(&full[state.stage_idx]), state.consumer_parity());
  }

  // One thread tells the producer, as a finished wgmma is finished for the warpgroup.
  TRACEA_DEVICE void release(int stage, int thread) {
    if (thread == 0) mbarrier_arrive(shared_address(&empty[stage]));
  }
};

// Issues the products of one stage by slabs of 64 rows; what was in the accumulators is lost
// unless `accumulate`.
template <class Mma, class DescriptorA, class DescriptorB, int kSteps, int kSlabs>
TRACEA_DEVICE void multiply_stage(float (&accumulators)[kSlabs][Mma::kAccumulators], u64 a,
                                  u64 b, bool accumulate) {
  wgmma_fence();
  TRACEA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      Mma::mma(accumulators[slab], a + slab * (64 * 128 / 16) + step * DescriptorA::kStep,
               b + step * DescriptorB::kStep, accumulate || step != 0);
    }
  }
  wgmma_commit_group();
}

// The block's dynamic shared memory. Swizzled copies and descriptors count on its alignment;
// nothing useful can happen without.
template <class Shared>
TRACEA_DEVICE Shared& swizzled_shared() {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  if (shared_address(smem_bytes) % 1024 != 0) __trap();
  return *reinterpret_cast<Shared*>(smem_bytes);
}

// Runs kernel.produce(task) in one thread of each of kTasks warps, and kernel.consume(i) in
// the warpgroups behind the first. No registers change hands where their number is 0.
template <int kTasks, int kProducerRegisters, int kConsumerRegisters, class Kernel>
TRACEA_DEVICE void run_roles(const Kernel& kernel) {
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (warpgroup == 0) {
    if constexpr (kProducerRegisters > 0) setmaxnreg_dec<kProducerRegisters>();
    if (warp < kTasks && elect_one()) kernel.produce(warp);
  } else {
    if constexpr (kConsumerRegisters > 0) setmaxnreg_inc<kConsumerRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace tracea
