// Types that every operation's arguments are made of.

#ifndef TRACEA_KERNELS_CPU_COMMON_TYPES_H_
#define TRACEA_KERNELS_CPU_COMMON_TYPES_H_

#include <cstdint>

namespace tracea::cpu {

enum class DType : int32_t { kF32, kBF16, kF16 };
enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluExact, kSilu };

// Half-open part [m0, m1) x [n0, n1) of a matrix product's result.
struct MatrixRange {
  int64_t m0, m1, n0, n1;
};

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_TYPES_H_
