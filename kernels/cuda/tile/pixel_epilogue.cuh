// What happens to the sums of two neighbouring channels of a pixel:
// z = sum + bias + residual, y = activation(z), one rounding, a store from the registers.
//
// Traits: ElementOut, ElementBias, ElementResidual, kHasBias, kHasResidual,
// kSavesPreactivation, kActivation.
#pragma once

#include "ptx/convert.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"

namespace tracea {

template <class Traits, class Params>
TRACEA_DEVICE Pair load_bias(const Params& p, int channel) {
  if constexpr (!Traits::kHasBias) return {0.0f, 0.0f};
  return load_pair<true>(static_cast<const typename Traits::ElementBias*>(p.bias) + channel,
                         p.channels - channel);
}

// Of the result's element `at` and the next one, if `count` is above zero.
template <class Traits, class Params>
TRACEA_DEVICE Pair load_residual(const Params& p, i64 at, int count) {
  if constexpr (!Traits::kHasResidual) return {0.0f, 0.0f};
  return load_pair<true>(static_cast<const typename Traits::ElementResidual*>(p.residual) + at,
                         count);
}

template <class Traits, class Params>
TRACEA_DEVICE void store_pixel(const Params& p, i64 at, int count, Pair sum, Pair bias,
                               Pair residual) {
  using Element = typename Traits::ElementOut;
  Pair z{sum.x + bias.x, sum.y + bias.y};
  if constexpr (Traits::kHasResidual) z = join<false>(z, residual);
  if constexpr (Traits::kSavesPreactivation) {
    store_pair<true>(static_cast<Element*>(p.preactivation) + at, count, z);
  }
  const Pair y{activate<Traits::kActivation>(z.x), activate<Traits::kActivation>(z.y)};
  store_pair<true>(static_cast<Element*>(p.out) + at, count, y);
}

}  // namespace tracea
