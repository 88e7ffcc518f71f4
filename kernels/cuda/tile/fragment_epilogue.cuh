// What happens to a warp's mma.sync accumulators: z = acc + bias, y = activation(z) +
// residual (or times residual), one rounding, and a store straight from the registers.
//
// Rows of the results may have any length. If it is even (kPairs) a lane stores its two
// neighbouring columns at once; the four lanes of a row fill 16 or 32 bytes.
//
// Traits: ElementOut, ElementBias, ElementResidual, kPairs, kHasBias, kBiasIsBatched,
// kHasResidual, kMultipliesResidual, kSavesPreactivation, kActivation.
#pragma once

#include "ptx/convert.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"

namespace tracea {

struct FragmentEpilogueParams {
  void* out;
  void* preactivation;   // null unless it is saved
  const void* bias;      // (n) or (batch, n), or null
  const void* residual;  // (batch, m, n), or null
  int m, n;
};

// Elements 0 and 1 of `first` in f32, of which `count` exist and the others are zero.
// kPairs: the address allows to load both at once.
template <bool kPairs, class Element>
TRACEA_DEVICE Pair load_pair(const Element* first, int count) {
  if constexpr (kPairs) {
    return load_pair_before<0>(first, count).widen();
  } else {
    return {count > 0 ? widen(first[0]) : 0.0f, count > 1 ? widen(first[1]) : 0.0f};
  }
}

// Element i of a pair as it lies in memory.
template <class Element>
TRACEA_DEVICE Element element(Packed<Element> packed, int i) {
  static_assert(sizeof(Element) == 2, "f32 has its own overload");
  return {static_cast<u16>(packed.bits >> (16 * i))};
}
TRACEA_DEVICE float element(Packed<float> packed, int i) {
  return i == 0 ? packed.value.x : packed.value.y;
}

template <class Element>
TRACEA_DEVICE void st_global(Element* first, Packed<Element> packed) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(first), "r"(packed.bits) : "memory");
}
TRACEA_DEVICE void st_global(float* first, Packed<float> packed) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(first), "f"(packed.value.x),
               "f"(packed.value.y)
               : "memory");
}

// Rounds a pair and stores the first `count` elements of it.
template <bool kPairs, class Element>
TRACEA_DEVICE void store_pair(Element* first, int count, Pair v) {
  const Packed<Element> packed = Packed<Element>::from(v);
  if constexpr (kPairs) {
    if (count > 0) st_global(first, packed);
  } else {
    if (count > 0) first[0] = element(packed, 0);
    if (count > 1) first[1] = element(packed, 1);
  }
}

// kRowBlocks fragments of 16 rows by kColumnBlocks of 8 columns of one warp.
template <class Traits, int kRowBlocks, int kColumnBlocks>
class FragmentEpilogue {
 public:
  using Element = typename Traits::ElementOut;
  using ElementBias = typename Traits::ElementBias;
  using ElementResidual = typename Traits::ElementResidual;

  // `m` and `n` are the warp's first row and column.
  TRACEA_DEVICE FragmentEpilogue(const FragmentEpilogueParams& params, int m, int n,
                                 int batch)
      : params_(params),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        m_(m),
        column_(n + mma_c_col(lane_, 0)),
        batch_(batch) {}

  TRACEA_DEVICE void store(const float (&accumulators)[kRowBlocks][kColumnBlocks][4]) {
    load_bias();
    TRACEA_UNROLL
    for (int block = 0; block < kRowBlocks; ++block) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = m_ + 16 * block + mma_c_row(lane_, 2 * half);
        store_row(accumulators[block], row, half);
      }
    }
  }

 private:
  TRACEA_DEVICE void load_bias() {
    if constexpr (Traits::kHasBias) {
      const i64 first = Traits::kBiasIsBatched ? static_cast<i64>(batch_) * params_.n : 0;
      const auto* bias = static_cast<const ElementBias*>(params_.bias) + first + column_;
      TRACEA_UNROLL
      for (int j = 0; j < kColumnBlocks; ++j) {
        bias_[j] = load_pair<Traits::kPairs>(bias + 8 * j, params_.n - column_ - 8 * j);
      }
    }
  }

  // The pairs of this lane in one row: the upper or lower half of its accumulators.
  TRACEA_DEVICE void store_row(const float (&accumulators)[kColumnBlocks][4], int row,
                               int half) {
    const i64 first =
        (static_cast<i64>(batch_) * params_.m + row) * params_.n + column_;
    const int count = row < params_.m ? params_.n - column_ : 0;
    Pair residual[kColumnBlocks];  // all are on their way before the first is needed
    if constexpr (Traits::kHasResidual) {
      const auto* source = static_cast<const ElementResidual*>(params_.residual) + first;
      TRACEA_UNROLL
      for (int j = 0; j < kColumnBlocks; ++j) {
        residual[j] = load_pair<Traits::kPairs>(source + 8 * j, count - 8 * j);
      }
    }
    TRACEA_UNROLL
    for (int j = 0; j < kColumnBlocks; ++j) {
      Pair z{accumulators[j][2 * half], accumulators[j][2 * half + 1]};
      if constexpr (Traits::kHasBias) z = {z.x + bias_[j].x, z.y + bias_[j].y};
      if constexpr (Traits::kSavesPreactivation) {
        auto* saved = static_cast<Element*>(params_.preactivation) + first;
        store_pair<Traits::kPairs>(saved + 8 * j, count - 8 * j, z);
      }
      Pair y{activate<Traits::kActivation>(z.x), activate<Traits::kActivation>(z.y)};
      if constexpr (Traits::kHasResidual) {
        y = join<Traits::kMultipliesResidual>(y, residual[j]);
      }
      auto* out = static_cast<Element*>(params_.out) + first;
      store_pair<Traits::kPairs>(out + 8 * j, count - 8 * j, y);
    }
  }

  const FragmentEpilogueParams& params_;
  const int lane_, m_, column_, batch_;
  Pair bias_[kColumnBlocks];
};

}  // namespace tracea
