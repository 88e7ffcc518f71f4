// What kernels/cuda/ptx/convert.cuh is in PTX, in builtins of clang for AMD GPUs: elements of
// memory as f32, and the approximations of the f32 units.
//
// HIP kernels find this file under the name of the other, so that the formulas that are
// written with it (tile/activation.cuh) are the same text on both.
#pragma once

#include "tile/common.cuh"

namespace tracea {

struct Pair {
  float x, y;
};

TRACEA_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TRACEA_DEVICE float fabsf(float x) { return __builtin_fabsf(x); }

TRACEA_DEVICE float widen(float v) { return v; }
TRACEA_DEVICE float widen(bf16 v) {
  return __builtin_bit_cast(float, static_cast<u32>(v.bits) << 16);
}
TRACEA_DEVICE float widen(f16 v) {
  return static_cast<float>(__builtin_bit_cast(_Float16, v.bits));
}

// The nearest element, ties to even; beyond the largest it is inf.
TRACEA_DEVICE void narrow(float v, float& element) { element = v; }
TRACEA_DEVICE void narrow(float v, bf16& element) {
  const u32 bits = __builtin_bit_cast(u32, v);
  const u32 rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  // A NaN stays one: adding to it may carry into the sign.
  element.bits = static_cast<u16>((v == v ? rounded : bits | 0x400000u) >> 16);
}
TRACEA_DEVICE void narrow(float v, f16& element) {
  element.bits = __builtin_bit_cast(u16, static_cast<_Float16>(v));
}

// 2^x, relative error 1 ulp; subnormals are zero.
TRACEA_DEVICE float ex2_approx(float x) { return __builtin_amdgcn_exp2f(x); }

// 1 / x within 1 ulp; 0 for inf.
TRACEA_DEVICE float rcp_approx(float x) { return __builtin_amdgcn_rcpf(x); }

// The larger of two numbers; NaN if either is NaN.
TRACEA_DEVICE float max_nan(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace tracea
