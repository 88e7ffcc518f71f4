// The arithmetic of XLA's threads, on threads that somebody else has set up.

#ifndef TRACEA_KERNELS_CAPI_ARITHMETIC_H_
#define TRACEA_KERNELS_CAPI_ARITHMETIC_H_

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tracea::capi {

// While it lives, the calling thread rounds to nearest, takes subnormal numbers for zero
// and goes on after exceptions of floating point, as XLA's threads do: a kernel has the
// same bits here and there. (Infinity minus infinity would end a program that has asked
// for signals, as by feenableexcept.)
class XlaArithmetic {
 public:
#if defined(__x86_64__)
  XlaArithmetic() : before_(_mm_getcsr()) {
    constexpr uint32_t kFlushToZero = 1 << 15, kRounding = 3 << 13, kAreZero = 1 << 6;
    constexpr uint32_t kNoSignals = 0x3f << 7;
    _mm_setcsr((before_ & ~kRounding) | kFlushToZero | kAreZero | kNoSignals);
  }
  ~XlaArithmetic() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
#elif defined(__aarch64__)
  XlaArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    constexpr uint64_t kFlushToZero = 1 << 24, kRounding = 3 << 22;
    constexpr uint64_t kSignals = 0x9f << 8;
    Set((before_ & ~(kRounding | kSignals)) | kFlushToZero);
  }
  ~XlaArithmetic() { Set(before_); }

 private:
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
  uint64_t before_;
#endif

 public:
  XlaArithmetic(const XlaArithmetic&) = delete;
  XlaArithmetic& operator=(const XlaArithmetic&) = delete;
};

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_ARITHMETIC_H_
