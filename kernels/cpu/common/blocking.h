// Arithmetic of cutting sizes into blocks, for what plans calls: compiled without any
// instruction set flag. Kernels have their own, in vec_impl.h.

#ifndef TRACEA_KERNELS_CPU_COMMON_BLOCKING_H_
#define TRACEA_KERNELS_CPU_COMMON_BLOCKING_H_

#include <algorithm>
#include <cstdint>

namespace tracea::cpu {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// The longest step <= `limit` (a multiple of `unit`) that cuts `size` into equal parts.
inline int64_t EqualStep(int64_t size, int64_t limit, int64_t unit) {
  limit = std::max(RoundUp(limit, unit), unit);
  if (size <= limit) return std::max(RoundUp(size, unit), unit);
  return RoundUp(CeilDiv(size, CeilDiv(size, limit)), unit);
}

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_BLOCKING_H_
