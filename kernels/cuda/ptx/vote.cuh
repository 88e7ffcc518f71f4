// What threads find out together.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Barrier 1: whether a statement is true for all threads of the first warpgroup.
TRACEA_DEVICE bool all_of_warpgroup(bool value) {
  u32 all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.and.aligned.pred q, 1, 128, p;\n"
      "selp.b32 %0, 1, 0, q;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<u32>(value))
      : "memory");
  return all != 0;
}

}  // namespace tracea
