// Values that the compiler takes for new: it neither makes them again where they are used, nor
// carries what follows from them through a loop. So a choice is made between registers and
// instructions where it would choose otherwise.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
TRACEA_DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
TRACEA_DEVICE Pair opaque(Pair value) {
  asm volatile("" : "+f"(value.x), "+f"(value.y));
  return value;
}

}  // namespace tracea
