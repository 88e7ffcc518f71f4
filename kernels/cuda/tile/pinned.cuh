// Values that stay in registers as they are, where the compiler would make them again in each
// round of a loop, and reads of shared memory at addresses that are made of such a value.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_store.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE u32 pinned(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
TRACEA_DEVICE Pair pinned(Pair value) {
  asm volatile("" : "+f"(value.x), "+f"(value.y));
  return value;
}

// Two neighbouring elements.
template <class Element>
TRACEA_DEVICE Pair shared_pair_at(u32 address) {
  if constexpr (sizeof(Element) == 2) {
    Packed<Element> packed;
    ld_shared(address, packed.bits);
    return packed.widen();
  } else {
    return ld_shared_pair(address);
  }
}

}  // namespace tracea
