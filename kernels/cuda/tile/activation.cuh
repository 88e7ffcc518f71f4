// Activations on f32 and what follows them, for the epilogues.
//
// All but relu take one exponential and one reciprocal. Their relative error is below 2e-6
// for x > -6 and below 1e-5 as far as f32 reaches, also where the result is tiny, so every
// output dtype may use them.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

enum class Activation { kNone, kRelu, kGelu, kGeluExact, kSilu };

// 1 / (1 + 2^x).
TRACEA_DEVICE float sigmoid_of_exponent(float x) {
  return rcp_approx(1.0f + ex2_approx(x));
}

constexpr float kLog2E = 1.4426950408889634f;

// The normal distribution's tail: Phi(-|x|) = erfc(t) / 2 = scaled * bell, t = |x| / sqrt 2,
// where bell = exp(-t^2). exp(t^2) erfc(t) is a polynomial of degree 8 in
// s = 1 / (1 + 0.42 t), fitted over 0 <= t <= 10 to a relative error of 4.1e-8.
struct NormalTail {
  float scaled, bell;
};
TRACEA_DEVICE NormalTail normal_tail(float x) {
  const float s = rcp_approx(fmaf(0.42f * 0.70710678118654752f, fabsf(x), 1.0f));
  float scaled = 0.5f * 0.0783894756f;
  scaled = fmaf(scaled, s, 0.5f * -0.356951365f);
  scaled = fmaf(scaled, s, 0.5f * 0.51032988f);
  scaled = fmaf(scaled, s, 0.5f * -0.203207188f);
  scaled = fmaf(scaled, s, 0.5f * 0.314210382f);
  scaled = fmaf(scaled, s, 0.5f * 0.17730427f);
  scaled = fmaf(scaled, s, 0.5f * 0.243571932f);
  scaled = fmaf(scaled, s, 0.5f * 0.236326711f);
  scaled = fmaf(scaled, s, 0.5f * 2.59424593e-05f);
  return {scaled, ex2_approx(-0.5f * kLog2E * (x * x))};
}

// What is `tail` at -|x|, and 1 - tail at |x|, without cancellation in the negative tail.
TRACEA_DEVICE float from_tail(float x, float tail) { return x < 0.0f ? tail : 1.0f - tail; }

// gelu's (1 + tanh u) / 2 = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), is
// sigmoid_of_exponent(x (kGeluLinear + kGeluCubic x^2)).
constexpr float kGeluLinear = -2.0f * 0.7978845608028654f * kLog2E;
constexpr float kGeluCubic = kGeluLinear * 0.044715f;

template <Activation kActivation>
TRACEA_DEVICE float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) {
    return max_nan(x, 0.0f);
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * sigmoid_of_exponent(x * fmaf(kGeluCubic * x, x, kGeluLinear));
  } else if constexpr (kActivation == Activation::kGeluExact) {
    const NormalTail tail = normal_tail(x);
    return x * from_tail(x, tail.scaled * tail.bell);
  } else if constexpr (kActivation == Activation::kSilu) {
    return x * sigmoid_of_exponent(-kLog2E * x);
  } else {
    return x;
  }
}

// activation'(x) dx. relu selects: what it cuts off may be inf or NaN. Of the others the
// error is below 1e-5 of max(1, |x|) activation'(x)'s largest term, as in what follows from
// the formula in f32.
template <Activation kActivation>
TRACEA_DEVICE float differentiate(float x, float dx) {
  if constexpr (kActivation == Activation::kRelu) {
    return x > 0.0f ? dx : 0.0f;
  } else if constexpr (kActivation == Activation::kGelu) {
    // With s = sigmoid(v), v = 2u: s + x s (1 - s) v', in an order that is s as long as v'
    // is finite where x v' no longer is.
    constexpr float kLinear = -kGeluLinear / kLog2E, kCubic = -3.0f * kGeluCubic / kLog2E;
    const float square = x * x;
    const float s = sigmoid_of_exponent(x * fmaf(kGeluCubic, square, kGeluLinear));
    return dx * fmaf(s * fmaf(-s, x, x), fmaf(kCubic, square, kLinear), s);
  } else if constexpr (kActivation == Activation::kGeluExact) {
    // Phi(x) + x phi(x), which is 1 - Phi(-x) + x phi(-x).
    constexpr float kDensityAtZero = 0.3989422804014327f;
    const NormalTail tail = normal_tail(x);
    const float y = tail.bell * fmaf(-kDensityAtZero, fabsf(x), tail.scaled);
    return dx * from_tail(x, y);
  } else if constexpr (kActivation == Activation::kSilu) {
    const float s = sigmoid_of_exponent(-kLog2E * x);
    return dx * fmaf(s, fmaf(-s, x, x), s);
  } else {
    return dx;
  }
}

// What follows an activation: a residual is added, or multiplied with.
template <bool kMultiplies>
TRACEA_DEVICE Pair join(Pair y, Pair residual) {
  if constexpr (kMultiplies) {
    return {y.x * residual.x, y.y * residual.y};
  } else {
    return {y.x + residual.x, y.y + residual.y};
  }
}

}  // namespace tracea
