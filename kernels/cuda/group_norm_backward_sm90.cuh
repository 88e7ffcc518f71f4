// group_norm_backward_sm90: the gradients of group_norm_sm90, see tile/norm.cuh. Each image
// leaves sums of its own. x and dy are read once, where a cluster has room for both, see
// tile/slab.cuh; dz is computed twice.
#pragma once

#include "tile/norm.cuh"
#include "tile/slab.cuh"

namespace tracea {

// Traits: those of NormSlab; Parameter, of scale and bias; kActivation.
template <class Traits>
TRACEA_DEVICE void group_norm_backward(const NormBackwardParams& p, u8* smem) {
  using Element = typename Traits::Element;
  using Parameter = typename Traits::Parameter;
  using Slab = NormSlab<Traits>;
  constexpr int kPack = Slab::kPack;
  static_assert(Slab::kSharedBytes == Traits::kSharedBytes,
                "the launch must know the shared memory that is laid out here");
  Slab slab(smem, p.rows, p.channels);
  const auto* x = static_cast<const Element*>(p.x);
  const auto* dy = static_cast<const Element*>(p.dy);
  slab.fetch(x, dy);

  const i64 group0 = static_cast<i64>(slab.image()) * slab.groups() + slab.first_group();
  float mean[kPack] = {}, inverse[kPack] = {}, scale[kPack] = {}, bias[kPack] = {};
  if (slab.is_on()) {
    TRACEA_UNROLL
    for (int j = 0; j < kPack; ++j) {
      const int c = slab.channel() + j;
      const i64 g = group0 + slab.local_channel(j) / Traits::kGroup;
      mean[j] = p.mean[g];
      inverse[j] = p.inverse[g];
      scale[j] = inverse[j] * widen(static_cast<const Parameter*>(p.scale)[c]);
      bias[j] = widen(static_cast<const Parameter*>(p.bias)[c]);
    }
  }
  float of_scaled[kPack] = {}, of_plain[kPack] = {};
  slab.for_each_arriving(
      [&](int, const Pack<Element>& v, const Pack<Element>& d) {
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
          const float centred = v.x[j] - mean[j];
          const float z = fmaf(centred, scale[j], bias[j]);
          const float dz = differentiate<Traits::kActivation>(z, d.x[j]);
          of_plain[j] += dz;
          of_scaled[j] = fmaf(dz, centred, of_scaled[j]);
        }
      },
      x, dy);
  TRACEA_UNROLL
  for (int j = 0; j < kPack; ++j) of_scaled[j] *= inverse[j];
  slab.add_up(of_scaled, of_plain);

  auto& shared = slab.shared();
  if (slab.rank() == 0) {
    float* sums = p.sums + static_cast<i64>(slab.image()) * 2 * p.channels;
    for (int c = static_cast<int>(threadIdx.x); c < Slab::kChannels; c += Traits::kThreads) {
      if (slab.first_channel() + c >= p.channels) break;
      sums[slab.first_channel() + c] = shared.slab[0][c];
      sums[p.channels + slab.first_channel() + c] = shared.slab[1][c];
    }
  }
  slab.for_each_group([&](int g) {
    const auto* scales = static_cast<const Parameter*>(p.scale) + slab.first_channel();
    const float share =
        1.0f / (static_cast<float>(p.rows) * static_cast<float>(Traits::kGroup));
    TRACEA_UNROLL
    for (int k = 0; k < 2; ++k) {
      const float sum = Slab::group_sum(
          g, [&](int c) { return shared.slab[k][c] * widen(scales[c]); });
      if (threadIdx.x % kWarpSize == 0) shared.groups[k][g] = sum * share;
    }
  });
  __syncthreads();

  float slope[kPack], shift[kPack];
  if (slab.is_on()) {
    TRACEA_UNROLL
    for (int j = 0; j < kPack; ++j) {
      const int g = slab.local_channel(j) / Traits::kGroup;
      slope[j] = -inverse[j] * inverse[j] * shared.groups[0][g];
      shift[j] = -inverse[j] * shared.groups[1][g];
    }
  }
  auto* dx = static_cast<Element*>(p.dx);
  slab.for_each(
      [&](int i, Pack<Element> v, const Pack<Element>& d) {
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
          const float centred = v.x[j] - mean[j];
          const float z = fmaf(centred, scale[j], bias[j]);
          const float dz = differentiate<Traits::kActivation>(z, d.x[j]);
          v.x[j] = fmaf(dz, scale[j], fmaf(centred, slope[j], shift[j]));
        }
        store_pack(dx + slab.address(i), v);
      },
      x, dy);
  slab.leave();
}

}  // namespace tracea
