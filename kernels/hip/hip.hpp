// Qualifiers of HIP, where the compiler was given none of ROCm's headers, and the units of a
// kernel: waves, threads, barriers.
//
// Everything is a builtin of clang, so that it compiles a kernel with neither ROCm's headers
// nor its device libraries. Headers that CUDA kernels share (kernels/cuda/tile) are compiled
// as they are: clang's pragma makes their functions callable here.
#pragma once

#if defined(__HIP__)
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define TRACEA_HIP_DEVICE __device__ inline __attribute__((always_inline))
#define GFX_BLOCK_SIZE(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#else  // a host that stands for the GPU, in tests
#define TRACEA_HIP_DEVICE inline
#define GFX_BLOCK_SIZE(threads)
#endif
#define TRACEA_HIP_UNROLL _Pragma("unroll")

#if defined(__HIP__)
#pragma clang force_cuda_host_device begin
#endif
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/pipeline.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"
#if defined(__HIP__)
#pragma clang force_cuda_host_device end
#endif

namespace tracea {

TRACEA_HIP_DEVICE int thread_index() {
  return static_cast<int>(__builtin_amdgcn_workitem_id_x());
}
TRACEA_HIP_DEVICE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }

// All threads of the block are here, and see what any of them wrote to shared memory.
TRACEA_HIP_DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

}  // namespace tracea
