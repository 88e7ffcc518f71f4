// A function of each element of one or two arrays:
//
//   out[i] = f(x[i], y[i])   or   f(x[i])
//
// Elements are real or complex numbers; an operand may be one number for all of them. A
// block computes a tile of consecutive elements, in packs of 16 bytes of the operands: each
// thread loads all its packs before it uses the first. The last tile goes element by
// element. Counts have 64 bits. Arrays are aligned to 16 bytes.
#pragma once

namespace tracea {

template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re, im;
};

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// One operand: an array, or a number for all elements.
template <typename T, bool kIsScalar>
struct Operand {
  const T* data;
  __device__ T element(long long i) const { return data[kIsScalar ? 0 : i]; }
  template <int N>
  __device__ Pack<T, N> pack(long long i) const {
    Pack<T, N> found;
    if constexpr (kIsScalar) {
#pragma unroll
      for (int j = 0; j < N; ++j) found.at[j] = data[0];
    } else {
      found = *reinterpret_cast<const Pack<T, N>*>(data + i);
    }
    return found;
  }
};

// Traits: Element, Result; kThreads, kPacks of a thread, kOperands (1 or 2), kScalar (0
// none, 1 left, 2 right); and f, static, whose text emit/elementwise.py has.
template <typename Traits>
__device__ void elementwise(const typename Traits::Element* x_data,
                            const typename Traits::Element* y_data,
                            typename Traits::Result* out, long long size) {
  using T = typename Traits::Element;
  using R = typename Traits::Result;
  constexpr int kPack = 16 / sizeof(T);
  constexpr long long kTile = (long long)Traits::kThreads * Traits::kPacks * kPack;
  const Operand<T, Traits::kScalar == 1> x{x_data};
  const Operand<T, Traits::kScalar == 2> y{y_data};  // x again, if there is one operand
  const long long begin = blockIdx.x * kTile;
  if (begin + kTile <= size) {
    Pack<T, kPack> a[Traits::kPacks], b[Traits::kPacks];
    const long long first = begin + threadIdx.x * kPack;
#pragma unroll
    for (int p = 0; p < Traits::kPacks; ++p) {
      const long long i = first + (long long)p * Traits::kThreads * kPack;
      a[p] = x.template pack<kPack>(i);
      if constexpr (Traits::kOperands == 2) b[p] = y.template pack<kPack>(i);
    }
#pragma unroll
    for (int p = 0; p < Traits::kPacks; ++p) {
      const long long i = first + (long long)p * Traits::kThreads * kPack;
      Pack<R, kPack> results;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        results.at[j] =
            Traits::f(a[p].at[j], (Traits::kOperands == 2 ? b : a)[p].at[j]);
      }
      *reinterpret_cast<Pack<R, kPack>*>(out + i) = results;
    }
  } else {
    for (long long i = begin + threadIdx.x; i < size; i += Traits::kThreads) {
      out[i] = Traits::f(x.element(i), y.element(i));
    }
  }
}

}  // namespace tracea
