// Pairs of elements in memory as pairs of f32, and the approximations of the f32 units.
#pragma once

#include "tile/common.cuh"

namespace tracea {

struct Pair {
  float x, y;
};

// Two adjacent elements as they lie in memory. `from` rounds to nearest even and overflows
// to inf.
template <class Element>
struct Packed;

template <>
struct Packed<bf16> {
  u32 bits;

  TRACEA_DEVICE static Packed from(Pair v) {
    Packed packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.bits) : "f"(v.y), "f"(v.x));
    return packed;
  }
  TRACEA_DEVICE Pair widen() const {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  }
};

template <>
struct Packed<f16> {
  u32 bits;

  TRACEA_DEVICE static Packed from(Pair v) {
    Packed packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed.bits) : "f"(v.y), "f"(v.x));
    return packed;
  }
  TRACEA_DEVICE Pair widen() const {
    Pair v;
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.f32.f16 %0, lo;\n"
        "cvt.f32.f16 %1, hi;\n"
        "}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(bits));
    return v;
  }
};

template <>
struct Packed<float> {
  Pair value;

  TRACEA_DEVICE static Packed from(Pair v) { return {v}; }
  TRACEA_DEVICE Pair widen() const { return value; }
};

// Loads elements kOffset and kOffset + 1 of `first` if there are more than kOffset, else
// zeros. Volatile and not .nc, so that the load stays between the barriers where it was
// written: moved up it would cost registers, moved down its latency would show. The offset
// is an immediate, so that a row of loads needs one address register.
template <int kOffset, class Element>
TRACEA_DEVICE Packed<Element> load_pair_before(const Element* first, int count) {
  static_assert(sizeof(Element) == 2, "f32 has its own overload");
  Packed<Element> packed{0u};
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.gt.s32 p, %2, %3;\n"
      "@p ld.global.b32 %0, [%1 + %4];\n"
      "}"
      : "+r"(packed.bits)
      : "l"(first), "r"(count), "n"(kOffset), "n"(kOffset * 2));
  return packed;
}
template <int kOffset>
TRACEA_DEVICE Packed<float> load_pair_before(const float* first, int count) {
  Packed<float> packed{{0.0f, 0.0f}};
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.gt.s32 p, %3, %4;\n"
      "@p ld.global.v2.f32 {%0, %1}, [%2 + %5];\n"
      "}"
      : "+f"(packed.value.x), "+f"(packed.value.y)
      : "l"(first), "r"(count), "n"(kOffset), "n"(kOffset * 4));
  return packed;
}

// The same for elements that may lie at any multiple of their size.
template <int kOffset, class Element>
TRACEA_DEVICE Packed<Element> load_each_before(const Element* first, int count) {
  static_assert(sizeof(Element) == 2, "f32 has its own overload");
  u16 pair[2] = {0, 0};
  TRACEA_UNROLL
  for (int i = 0; i < 2; ++i) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.gt.s32 p, %2, %3;\n"
        "@p ld.global.b16 %0, [%1];\n"
        "}"
        : "+h"(pair[i])
        : "l"(first + kOffset + i), "r"(count), "r"(kOffset + i));
  }
  return {static_cast<u32>(pair[1]) << 16 | pair[0]};
}
template <int kOffset>
TRACEA_DEVICE Packed<float> load_each_before(const float* first, int count) {
  Packed<float> packed{{0.0f, 0.0f}};
  float* pair[2] = {&packed.value.x, &packed.value.y};
  TRACEA_UNROLL
  for (int i = 0; i < 2; ++i) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.gt.s32 p, %2, %3;\n"
        "@p ld.global.f32 %0, [%1];\n"
        "}"
        : "+f"(*pair[i])
        : "l"(first + kOffset + i), "r"(count), "r"(kOffset + i));
  }
  return packed;
}

// One element of memory as f32.
TRACEA_DEVICE float widen(float v) { return v; }
TRACEA_DEVICE float widen(bf16 v) { return __uint_as_float(static_cast<u32>(v.bits) << 16); }
TRACEA_DEVICE float widen(f16 v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}

// 2^x, relative error below 2^-22; subnormals are zero.
TRACEA_DEVICE float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; 0 for inf.
TRACEA_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two numbers; NaN if either is NaN.
TRACEA_DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace tracea
