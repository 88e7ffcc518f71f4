// tanh of scores, on the units that multiply and add: those that softmax's exponentials
// need have nothing left.
//
//     |x| <= 1    x P(x^2)                     for all scores of a warp, mostly
//     beyond      1 - 2 / (1 + exp(2 |x|))     with the sign of x
//
// P is within 7e-6 of tanh(x) / x, relatively: a score of 30 is 2e-4 off, and weights are
// rounded to 2e-3 of themselves in bf16.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

TRACEA_DEVICE float tanh_narrow(float x) {
  constexpr float kP[] = {0.999993086f, -0.332980663f, 0.130368114f, -0.0448175594f,
                          0.00903642643f};
  const float y = x * x;
  float sum = kP[4];
  TRACEA_UNROLL
  for (int i = 3; i >= 0; --i) sum = fmaf(sum, y, kP[i]);
  return x * sum;
}

TRACEA_DEVICE float tanh_any(float x) {
  constexpr float kTwoLog2E = 2.885390081777927f;
  const float far = fmaf(-2.0f, rcp_approx(1.0f + ex2_approx(fabsf(x) * kTwoLog2E)), 1.0f);
  return fabsf(x) > 1.0f ? copysignf(far, x) : tanh_narrow(x);
}

// Scores become tanh(factor s).
template <int kCount>
TRACEA_DEVICE void soft_cap(float (&s)[kCount], float factor) {
  float most[2] = {0.0f, 0.0f};
  TRACEA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    s[i] *= factor;
    most[i % 2] = fmaxf(most[i % 2], fabsf(s[i]));
  }
  if (__all_sync(0xFFFFFFFFu, fmaxf(most[0], most[1]) <= 1.0f)) {
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) s[i] = tanh_narrow(s[i]);
  } else {
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) s[i] = tanh_any(s[i]);
  }
}

TRACEA_DEVICE float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The derivative of tanh where a weight was p = 2^(scale tanh - exponent), from the weight:
// 1 - tanh^2. Of no weight, and of a query that has none, it is 0.
TRACEA_DEVICE float soft_cap_slope(float p, float exponent, float unscale) {
  const float bounded = fminf(fmaxf((lg2_approx(p) + exponent) * unscale, -1.0f), 1.0f);
  return fmaf(-bounded, bounded, 1.0f);
}

}  // namespace tracea
