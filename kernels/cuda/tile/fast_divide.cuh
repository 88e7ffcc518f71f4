// Division by a number that a kernel's launch knows: one multiplication and one shift.
//
//   n / d = (n * multiplier) >> shift      n < 2^31, 1 <= d < 2^31
//   shift = 31 + s, multiplier = ceil(2^shift / d), where 2^s is the power of two not below d
//
// The multiplier has at most 32 bits, and exceeds 2^shift / d by less than 1 <= 2^s / d, so
// that the product is too large by less than 2^shift / d: never enough to reach the next
// quotient. tracea_jax/ir/fast_divide.py is the same in Python.
#pragma once

#include "tile/common.cuh"

namespace tracea {

struct FastDivisor {
  u32 divisor, multiplier;
  int shift;

  TRACEA_HOST_DEVICE constexpr u32 divide(u32 n) const {
    return static_cast<u32>(static_cast<u64>(n) * multiplier >> shift);
  }
};

}  // namespace tracea
