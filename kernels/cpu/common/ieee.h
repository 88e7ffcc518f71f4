// Arithmetic as IEEE 754 defines it, on threads that somebody else has set up.

#ifndef TRACEA_KERNELS_CPU_COMMON_IEEE_H_
#define TRACEA_KERNELS_CPU_COMMON_IEEE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tracea::cpu {

// While it lives, the calling thread rounds to nearest and has subnormal numbers. XLA's
// threads take them for zero.
class IeeeArithmetic {
 public:
#if defined(__x86_64__)
  IeeeArithmetic() : before_(_mm_getcsr()) {
    constexpr uint32_t kFlushToZero = 1 << 15, kRounding = 3 << 13, kAreZero = 1 << 6;
    _mm_setcsr(before_ & ~(kFlushToZero | kRounding | kAreZero));
  }
  ~IeeeArithmetic() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
#elif defined(__aarch64__)
  IeeeArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    constexpr uint64_t kFlushToZero = 1 << 24, kRounding = 3 << 22;
    Set(before_ & ~(kFlushToZero | kRounding));
  }
  ~IeeeArithmetic() { Set(before_); }

 private:
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
  uint64_t before_;
#endif

 public:
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;
};

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_IEEE_H_
