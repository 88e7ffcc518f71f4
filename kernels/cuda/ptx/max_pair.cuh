// The larger of two elements, two at a time; NaN if either is NaN. For sm_80 and newer. (PTX
// ISA, "max.NaN.bf16x2".)
#pragma once

#include "tile/common.cuh"

namespace tracea {

TRACEA_HOST_DEVICE constexpr bool is_bf16(bf16) { return true; }
TRACEA_HOST_DEVICE constexpr bool is_bf16(f16) { return false; }

template <class Element>
TRACEA_DEVICE u32 max_nan_pair(u32 a, u32 b) {
  static_assert(sizeof(Element) == 2, "two elements are a word");
  constexpr bool kIsBf16 = is_bf16(Element{});
  u32 y;
  if constexpr (kIsBf16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// Whether either is NaN.
template <class Element>
TRACEA_DEVICE bool is_nan_pair(u32 pair) {
  constexpr u32 kInfinity = is_bf16(Element{}) ? 0x7F80u : 0x7C00u;
  return (pair & 0x7FFFu) > kInfinity || (pair >> 16 & 0x7FFFu) > kInfinity;
}

}  // namespace tracea
