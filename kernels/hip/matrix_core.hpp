// Products of 16 x 16 tiles by one wave: MFMA of 64 lanes, or WMMA of 32.
//
// `Fragment` is what one lane holds of 16 rows of A, or 16 columns of B, along 16 of k: its
// row (or column) is lane mod 16, its elements are kElements consecutive ones from
// first_k(lane). It is the same for A and B, so that both lie in shared memory with k along
// rows. Accumulator i of a lane is at row c_row(lane, i), column lane mod 16:
//
//                 lanes  kElements  first_k           c_row(lane, i)
//   MFMA            64       4      4 (lane div 16)   4 (lane div 16) + i,  i < 4
//   WMMA            32      16      0                 2 i + lane div 16,    i < 8
//
// f32 has MFMA of 4 along k: element j of all lanes is k = j, 4 + j, 8 + j, 12 + j, which A
// and B do alike, so that four of them sum all 16.
// (AMD: "CDNA 3 ISA", "Dense matrix layouts"; "RDNA 3 ISA", "WMMA".)
#pragma once

#include "hip.hpp"

namespace tracea {

template <class T, int kCount>
using Vector = T __attribute__((ext_vector_type(kCount)));

struct MfmaMap {
  static constexpr int kLanes = 64, kElements = 4, kAccumulators = 4;
  TRACEA_HIP_DEVICE static constexpr int first_k(int lane) { return 4 * (lane / 16); }
  TRACEA_HIP_DEVICE static constexpr int c_row(int lane, int i) {
    return 4 * (lane / 16) + i;
  }
};

struct WmmaMap {
  static constexpr int kLanes = 32, kElements = 16, kAccumulators = 8;
  TRACEA_HIP_DEVICE static constexpr int first_k(int) { return 0; }
  TRACEA_HIP_DEVICE static constexpr int c_row(int lane, int i) {
    return 2 * i + lane / 16;
  }
};

template <class Element>
struct Mfma;

template <>
struct Mfma<bf16> : MfmaMap {
  using Fragment = Vector<short, 4>;
  using Accumulator = Vector<float, 4>;
  TRACEA_HIP_DEVICE static Accumulator multiply(Fragment a, Fragment b, Accumulator c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
  }
};

template <>
struct Mfma<f16> : MfmaMap {
  using Fragment = Vector<_Float16, 4>;
  using Accumulator = Vector<float, 4>;
  TRACEA_HIP_DEVICE static Accumulator multiply(Fragment a, Fragment b, Accumulator c) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
  }
};

template <>
struct Mfma<float> : MfmaMap {
  using Fragment = Vector<float, 4>;
  using Accumulator = Vector<float, 4>;
  TRACEA_HIP_DEVICE static Accumulator multiply(Fragment a, Fragment b, Accumulator c) {
    TRACEA_HIP_UNROLL
    for (int j = 0; j < 4; ++j) {
      c = __builtin_amdgcn_mfma_f32_16x16x4f32(a[j], b[j], c, 0, 0, 0);
    }
    return c;
  }
};

template <class Element>
struct Wmma;

template <>
struct Wmma<bf16> : WmmaMap {
  using Fragment = Vector<short, 16>;
  using Accumulator = Vector<float, 8>;
  TRACEA_HIP_DEVICE static Accumulator multiply(Fragment a, Fragment b, Accumulator c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
  }
};

template <>
struct Wmma<f16> : WmmaMap {
  using Fragment = Vector<_Float16, 16>;
  using Accumulator = Vector<float, 8>;
  TRACEA_HIP_DEVICE static Accumulator multiply(Fragment a, Fragment b, Accumulator c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
  }
};

}  // namespace tracea
