// Warpgroup matrix multiply: ordering and shared-memory descriptors (PTX ISA,
// "wgmma.mma_async"). The multiplications themselves are generated, one for each shape.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Orders register accesses before the next wgmma. Needed before the first of a batch.
TRACEA_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

TRACEA_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` committed batches are unfinished.
template <int kPending>
TRACEA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of accumulators across a wait.
template <int kCount>
TRACEA_DEVICE void wgmma_fence_operands(float (&registers)[kCount]) {
  TRACEA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// How the tensor cores read an operand: a tile whose rows are 128 bytes, swizzled.
//
//   bits   63-62  51-49        45-32     29-16     13-0
//          mode   base offset  SBO / 16  LBO / 16  address / 16       mode 1 = 128 B
//
// K-major: a row is 64 elements of k. SBO is the distance of 8-row groups; LBO is unused.
// MN-major: a row is 64 elements of m or n. SBO is the distance of groups of 8 k, LBO of
// slabs of 64 elements of m or n. Buffers start on 1024 bytes, so the base offset is 0.
template <bool kMnMajor, u32 kSlabBytes>
struct OperandDescriptor {
  static constexpr u32 kGroupBytes = 8 * 128;
  static constexpr u32 kLeadingBytes = kMnMajor ? kSlabBytes : 16;
  // Distance of the next k16 step, in the unit of the address field.
  static constexpr u32 kStep = (kMnMajor ? 2 * kGroupBytes : 32) / 16;

  TRACEA_HOST_DEVICE static constexpr u64 encode(u32 address) {
    return (u64{1} << 62) | (u64{kGroupBytes / 16} << 32) | (u64{kLeadingBytes / 16} << 16) |
           ((address & 0x3FFFFu) / 16);
  }
};

}  // namespace tracea
