// The peak of f32 arithmetic of one thread: independent chains of multiply-adds on the
// widest vectors that the compiler flags allow.

#include <cstdint>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kChains = 12;  // more than latency times ports, fewer than registers
constexpr int kSteps = 64;

typedef float Vec __attribute__((vector_size(kLanes * 4)));

// Runs that many rounds; the floating-point operations that they are.
extern "C" double multiply_adds(int64_t rounds) {
  Vec sums[kChains] = {};
  const Vec factor = Vec{} + 0.999f;
  const Vec term = Vec{} + 0.001f;
  for (int64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (int chain = 0; chain < kChains; ++chain) {
        sums[chain] = sums[chain] * factor + term;
      }
    }
    asm volatile("" : : : "memory");
  }
  float total = 0;
  for (const Vec& sum : sums) total += sum[0];
  asm volatile("" : : "x"(total));
  return 2.0 * kLanes * kChains * kSteps * static_cast<double>(rounds);
}
