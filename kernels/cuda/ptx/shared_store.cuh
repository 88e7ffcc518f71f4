// Stores of register fragments into shared memory, and what is read back, also from the
// shared memory of other blocks of the cluster.
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

TRACEA_DEVICE void st_shared(u32 address, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

TRACEA_DEVICE void st_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// The bits of one element.
TRACEA_DEVICE void ld_shared(u32 address, u16& v) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
}
TRACEA_DEVICE void ld_shared(u32 address, u32& v) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
}

// Two neighbouring words.
TRACEA_DEVICE void ld_shared(u32 address, u32& v0, u32& v1) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(v0), "=r"(v1)
               : "r"(address)
               : "memory");
}

TRACEA_DEVICE Words ld_shared_words(u32 address) {
  Words v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(address)
               : "memory");
  return v;
}

TRACEA_DEVICE Pair ld_shared_pair(u32 address) {
  Pair v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address)
               : "memory");
  return v;
}

struct Quad {
  float x[4];
};

TRACEA_DEVICE void st_shared(u32 address, const Quad& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x[0]),
               "f"(v.x[1]), "f"(v.x[2]), "f"(v.x[3])
               : "memory");
}

// The same address in block `rank` of the cluster.
TRACEA_DEVICE u32 cluster_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

TRACEA_DEVICE Quad ld_shared_cluster(u32 address) {
  Quad v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3])
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace tracea
