// Stores of register fragments into shared memory.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

// Four 8x8 matrices of 16-bit elements; lane l points at row l%8 of matrix l/8.
TRACEA_DEVICE void stmatrix_x4(u32 address, u32 p0, u32 p1, u32 p2, u32 p3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(p0), "r"(p1), "r"(p2), "r"(p3)
               : "memory");
}

TRACEA_DEVICE void st_shared(u32 address, Pair v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y)
               : "memory");
}

TRACEA_DEVICE void st_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

TRACEA_DEVICE Pair ld_shared_pair(u32 address) {
  Pair v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address)
               : "memory");
  return v;
}

}  // namespace tracea
