// layer_norm: the norm of tile/norm.cuh, of each row of channels. A row is read once and
// stays in the registers of a few lanes, see tile/row.cuh; so its variance is the sum of
// squared distances from the mean, by definition.
#pragma once

#include "tile/activation.cuh"
#include "tile/norm.cuh"
#include "tile/row.cuh"

namespace tracea {

// Traits: those of NormRow; Parameter, of scale and bias; kActivation.
template <class Traits>
TRACEA_DEVICE void layer_norm(const NormParams& p) {
  using Element = typename Traits::Element;
  using Row = NormRow<Traits>;
  constexpr int kPack = Row::kPack, kPacks = Row::kPacks;
  const Row row(p.channels);
  const float share = 1.0f / static_cast<float>(p.channels);
  float scale[kPacks][kPack], bias[kPacks][kPack];
  row.template load<typename Traits::Parameter>(p.scale, scale);
  row.template load<typename Traits::Parameter>(p.bias, bias);
  row.for_each(p.rows, [&](i64 r, bool exists) {
    typename Row::Words x;
    row.load(static_cast<const Element*>(p.x), r, exists, x);
    float sum = 0.0f, squares = 0.0f;
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      const auto v = Pack<Element>::from(x[k]);
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) sum += v.x[j];
    }
    const float mean = Row::sum(sum) * share;
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (!row.has(k)) continue;
      const auto v = Pack<Element>::from(x[k]);
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        const float d = v.x[j] - mean;
        squares = fmaf(d, d, squares);
      }
    }
    const float inverse = 1.0f / sqrtf(Row::sum(squares) * share + p.epsilon);
    if (!exists) return;
    if (row.lane() == 0) {
      p.mean[r] = mean;
      p.inverse[r] = inverse;
    }
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (!row.has(k)) continue;
      auto v = Pack<Element>::from(x[k]);
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        const float z = fmaf((v.x[j] - mean) * inverse, scale[k][j], bias[k][j]);
        v.x[j] = activate<Traits::kActivation>(z);
      }
      store_pack(static_cast<Element*>(p.y) + r * p.channels + row.channel(k), v);
    }
  });
}

}  // namespace tracea
