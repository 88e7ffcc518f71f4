// The builtins of clang for AMD GPUs that kernels/hip uses, on a host. What the matrix
// instructions do is written down element by element, from AMD's ISA documents.
#pragma once

#include <cmath>

#include "block.hpp"

#define __global__
#define __device__
#define __shared__ static __attribute__((section("tracea_shared")))

extern "C" char __start_tracea_shared[], __stop_tracea_shared[];

namespace host {

inline void poison_shared() {
  std::memset(__start_tracea_shared, 0xFF,
              static_cast<size_t>(__stop_tracea_shared - __start_tracea_shared));
}

template <class T, int n>
using Vector = T __attribute__((ext_vector_type(n)));

inline float value(float x) { return x; }
inline float value(_Float16 x) { return static_cast<float>(x); }
inline float value(short bf16) {
  return __builtin_bit_cast(float, static_cast<unsigned>(static_cast<unsigned short>(bf16))
                                       << 16);
}

template <class Fragment, class Accumulator>
struct Given {
  Fragment a, b;
  Accumulator c;
};

// D[i][j] = C[i][j] + sum_k A[i][k] B[k][j], k < 4 kItems: A[i][k] is item k % kItems of
// lane i + 16 (k / kItems), B[k][j] that of lane j + 16 (k / kItems), and C[i][j] item i % 4
// of lane j + 16 (i / 4).
template <class Fragment, int kItems>
void mfma(void* const* lanes) {
  using G = Given<Fragment, Vector<float, 4>>;
  Vector<float, 4> results[64];
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      double sum = static_cast<const G*>(lanes[j + 16 * (i / 4)])->c[i % 4];
      for (int k = 0; k < 4 * kItems; ++k) {
        const auto& a = static_cast<const G*>(lanes[i + 16 * (k / kItems)])->a;
        const auto& b = static_cast<const G*>(lanes[j + 16 * (k / kItems)])->b;
        sum += double(value(a[k % kItems])) * value(b[k % kItems]);
      }
      results[j + 16 * (i / 4)][i % 4] = static_cast<float>(sum);
    }
  }
  for (int lane = 0; lane < 64; ++lane) static_cast<G*>(lanes[lane])->c = results[lane];
}

// The same of 32 lanes: A[i][k] is item k of lanes i and i + 16, which must agree, B[k][j]
// that of lanes j and j + 16, and C[i][j] item i / 2 of lane j + 16 (i % 2).
template <class Fragment>
void wmma(void* const* lanes) {
  using G = Given<Fragment, Vector<float, 8>>;
  Vector<float, 8> results[32];
  for (int lane = 0; lane < 16; ++lane) {
    const G &low = *static_cast<const G*>(lanes[lane]);
    const G &high = *static_cast<const G*>(lanes[lane + 16]);
    if (std::memcmp(&low.a, &high.a, sizeof low.a) || std::memcmp(&low.b, &high.b, sizeof low.b)) {
      fail("the halves of a wave hold different operands");
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      double sum = static_cast<const G*>(lanes[j + 16 * (i % 2)])->c[i / 2];
      for (int k = 0; k < 16; ++k) {
        sum += double(value(static_cast<const G*>(lanes[i])->a[k])) *
               value(static_cast<const G*>(lanes[j])->b[k]);
      }
      results[j + 16 * (i % 2)][i / 2] = static_cast<float>(sum);
    }
  }
  for (int lane = 0; lane < 32; ++lane) static_cast<G*>(lanes[lane])->c = results[lane];
}

template <class Fragment, class Accumulator>
Accumulator multiply(Together how, Fragment a, Fragment b, Accumulator c) {
  Given<Fragment, Accumulator> given{a, b, c};
  together(how, &given);
  return given.c;
}

// One element a lane, as vectors of one have no brackets.
struct Single {
  float v;
  float operator[](int) const { return v; }
};

}  // namespace host

using Short4 = host::Vector<short, 4>;
using Half4 = host::Vector<_Float16, 4>;
using Short16 = host::Vector<short, 16>;
using Half16 = host::Vector<_Float16, 16>;
using Float4 = host::Vector<float, 4>;
using Float8 = host::Vector<float, 8>;

inline Float4 __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(Short4 a, Short4 b, Float4 c, int, int,
                                                        int) {
  return host::multiply(host::mfma<Short4, 4>, a, b, c);
}
inline Float4 __builtin_amdgcn_mfma_f32_16x16x16f16(Half4 a, Half4 b, Float4 c, int, int, int) {
  return host::multiply(host::mfma<Half4, 4>, a, b, c);
}
inline Float4 __builtin_amdgcn_mfma_f32_16x16x4f32(float a, float b, Float4 c, int, int, int) {
  return host::multiply(host::mfma<host::Single, 1>, host::Single{a}, host::Single{b}, c);
}
inline Float8 __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(Short16 a, Short16 b, Float8 c) {
  return host::multiply(host::wmma<Short16>, a, b, c);
}
inline Float8 __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(Half16 a, Half16 b, Float8 c) {
  return host::multiply(host::wmma<Half16>, a, b, c);
}

inline unsigned __builtin_amdgcn_workitem_id_x() { return host::thread_index; }
inline unsigned __builtin_amdgcn_workgroup_id_x() { return host::block_index; }
inline void __builtin_amdgcn_s_barrier() { host::barrier(); }
inline void __builtin_amdgcn_fence(unsigned, const char*) {}
inline float __builtin_amdgcn_exp2f(float x) { return std::exp2(x); }
inline float __builtin_amdgcn_rcpf(float x) { return 1.0f / x; }
