// tanh of scores, on the units that multiply and add: those that softmax's exponentials
// need have nothing left.
//
//     |x| <= 1    x P(x^2)                     for all scores of a warp, mostly
//     beyond      1 - 2 / (1 + exp(2 |x|))     with the sign of x
//
// P is within 7e-6 of tanh(x) / x, relatively: a score of 30 is 2e-4 off, and weights are
// rounded to 2e-3 of themselves in bf16.
//
// Where no score needs a mask, SoftCap leaves tanh to the exponent of the weight, which is a
// polynomial of the score then, of few terms as most scores are small. It looks at the
// largest score of a row only. Lower ones may be outside of the polynomial's range, if they
// weigh next to nothing beside the largest: out there it falls as tanh does, or faster.
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

// c tanh(factor x) - shift where factor x is at most 1/2, within 2.3e-5 of c tanh(factor x).
struct CapCurve {
  float terms[3];

  TRACEA_DEVICE float operator()(float x, float minus_shift) const {
    const float y = x * x;
    return fmaf(x, fmaf(fmaf(terms[2], y, terms[1]), y, terms[0]), minus_shift);
  }
};

// What OnlineSoftmax makes of scores x before they are weighed: tanh(factor x).
struct SoftCap {
  static constexpr float kTanhHalf = 0.46211716f;
  // Scores below the curve's range must have at most 2^-kFaint of the weight of a row's
  // largest, and logarithms be so small that the curve's error is below 2^-10.
  static constexpr float kFaint = 10.0f, kMost = 40.0f;
  float factor;

  TRACEA_DEVICE float operator()(float x) const { return tanh_any(x * factor); }

  template <int kCount>
  TRACEA_DEVICE void all(float (&s)[kCount]) const {
    soft_cap(s, factor);
  }

  // Whether the curve does for rows with these largest scores, after the cap, of all lanes
  // of the warp. c: what weights' logarithms have of tanh.
  TRACEA_DEVICE bool are_near(const float (&capped)[2], float c) const {
    const float range = kTanhHalf * c;
    const bool near = fmaxf(capped[0], capped[1]) * c <= fminf(range, kMost) &&
                      fminf(capped[0], capped[1]) * c >= fmaxf(kFaint - range, -kMost);
    return __all_sync(0xFFFFFFFFu, near);
  }

  TRACEA_DEVICE CapCurve curve(float c) const {
    const float first = c * factor, square = factor * factor;
    return {{0.99997741f * first, -0.3316915f * first * square,
             0.11520977f * first * square * square}};
  }
};

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
