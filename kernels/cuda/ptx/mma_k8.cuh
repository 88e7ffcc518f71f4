// Warp-wide products of 16-bit elements that are 8 deep, for sm_80 and newer, accumulated in
// f32: half of a step of ptx/mma.cuh. Registers are those of the same half there. (PTX ISA,
// "mma.m16n8k8".)
#pragma once

#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
TRACEA_DEVICE void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b, f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace tracea
