// layer_norm_backward: the gradients of layer_norm, see tile/norm.cuh. A thread adds dscale
// and dbias of its channels in registers while its block walks down the rows, and each block
// leaves sums. Orders are fixed.
#pragma once

#include "tile/activation.cuh"
#include "tile/norm.cuh"
#include "tile/row.cuh"

namespace tracea {

// Traits: those of NormRow; Parameter, of scale and bias; kActivation.
template <class Traits>
TRACEA_DEVICE void layer_norm_backward(const NormBackwardParams& p) {
  using Element = typename Traits::Element;
  using Row = NormRow<Traits>;
  constexpr int kPack = Row::kPack, kPacks = Row::kPacks;
  constexpr int kWarps = Traits::kThreads / kWarpSize;
  const Row row(p.channels);
  const float share = 1.0f / static_cast<float>(p.channels);
  float scale[kPacks][kPack], bias[kPacks][kPack];
  row.template load<typename Traits::Parameter>(p.scale, scale);
  if constexpr (Traits::kActivation != Activation::kNone) {
    row.template load<typename Traits::Parameter>(p.bias, bias);
  }
  float dscale[kPacks][kPack] = {}, dbias[kPacks][kPack] = {};
  row.for_each(p.rows, [&](i64 r, bool exists) {
    typename Row::Words x, dy;
    row.load(static_cast<const Element*>(p.x), r, exists, x);
    row.load(static_cast<const Element*>(p.dy), r, exists, dy);
    const float mean = exists ? p.mean[r] : 0.0f, inverse = exists ? p.inverse[r] : 0.0f;
    float plain = 0.0f, scaled = 0.0f;
    const auto gradient = [&](int k, int j, float n, float d) {
      if constexpr (Traits::kActivation == Activation::kNone) {
        return d;
      } else {
        return differentiate<Traits::kActivation>(fmaf(n, scale[k][j], bias[k][j]), d);
      }
    };
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (!row.has(k) || !exists) continue;
      const auto v = Pack<Element>::from(x[k]), d = Pack<Element>::from(dy[k]);
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        const float n = (v.x[j] - mean) * inverse;
        const float dz = gradient(k, j, n, d.x[j]);
        const float g = dz * scale[k][j];
        plain += g;
        scaled = fmaf(g, n, scaled);
        dbias[k][j] += dz;
        dscale[k][j] = fmaf(dz, n, dscale[k][j]);
      }
    }
    plain = Row::sum(plain) * share;
    scaled = Row::sum(scaled) * share;
    if (!exists) return;
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if (!row.has(k)) continue;
      auto v = Pack<Element>::from(x[k]);
      const auto d = Pack<Element>::from(dy[k]);
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        const float n = (v.x[j] - mean) * inverse;
        const float g = gradient(k, j, n, d.x[j]) * scale[k][j];
        v.x[j] = inverse * (g - fmaf(n, scaled, plain));
      }
      store_pack(static_cast<Element*>(p.dx) + r * p.channels + row.channel(k), v);
    }
  });

  // The rows of a warp, then its warps.
  __shared__ float sums[kWarps][Traits::kLanes * kPack];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  TRACEA_UNROLL
  for (int which = 0; which < 2; ++which) {
    TRACEA_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      TRACEA_UNROLL
      for (int j = 0; j < kPack; ++j) {
        float v = which == 0 ? dscale[k][j] : dbias[k][j];
        TRACEA_UNROLL
        for (int bit = kWarpSize / 2; bit >= Traits::kLanes; bit /= 2) {
          v += __shfl_xor_sync(0xFFFFFFFFu, v, bit);
        }
        if (thread % kWarpSize < Traits::kLanes) sums[warp][row.lane() * kPack + j] = v;
      }
      __syncthreads();
      for (int c = thread; c < Traits::kLanes * kPack; c += Traits::kThreads) {
        const int channel = k * Traits::kLanes * kPack + c;
        if (channel >= p.channels) break;
        float total = 0.0f;
        TRACEA_UNROLL
        for (int w = 0; w < kWarps; ++w) total += sums[w][c];
        p.sums[(static_cast<i64>(blockIdx.x) * 2 + which) * p.channels + channel] = total;
      }
      __syncthreads();
    }
  }
}

}  // namespace tracea
