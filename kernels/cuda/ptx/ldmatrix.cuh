// Loads of operand fragments from shared memory. (PTX ISA, "ldmatrix".)
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Four 8x8 matrices of 16-bit elements, or of 8x4 words; lane l points at the 16 bytes of
// row l%8 of matrix l/8 and gets word l%4 of row l/4 of each.
TRACEA_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same matrices transposed: a lane gets rows 2(l%4) and the next one of column l/4.
TRACEA_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

TRACEA_DEVICE u32 ld_shared_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

}  // namespace tracea
