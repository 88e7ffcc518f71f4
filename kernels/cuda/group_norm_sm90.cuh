// group_norm_sm90: the norm of tile/norm.cuh, of each image and group of channels over its
// pixels and channels. A slab of an image is read once, where a cluster has room for it, see
// tile/slab.cuh. Each thread takes the distances of its pixels from its first one, so that
// squares of a mean that is large do not drown the variance.
//
// PTX ISA: "cp.async", "barrier.cluster", "mapa".
#pragma once

#include "tile/norm.cuh"
#include "tile/slab.cuh"

namespace tracea {

// Traits: those of NormSlab; Parameter, of scale and bias; kActivation.
template <class Traits>
TRACEA_DEVICE void group_norm(const NormParams& p, u8* smem) {
  using Element = typename Traits::Element;
  using Parameter = typename Traits::Parameter;
  using Slab = NormSlab<Traits>;
  constexpr int kPack = Slab::kPack;
  static_assert(Slab::kSharedBytes == Traits::kSharedBytes,
                "the launch must know the shared memory that is laid out here");
  Slab slab(smem, p.rows, p.channels);
  const auto* x = static_cast<const Element*>(p.x);
  slab.fetch(x);

  // Mean and squares of each channel of the thread.
  float first[kPack] = {}, sum[kPack] = {}, squares[kPack] = {};
  slab.for_each_arriving(
      [&](int i, const Pack<Element>& v) {
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
          if (i == 0) first[j] = v.x[j];
          const float d = v.x[j] - first[j];
          sum[j] += d;
          squares[j] = fmaf(d, d, squares[j]);
        }
      },
      x);
  const float share = slab.count() > 0 ? 1.0f / static_cast<float>(slab.count()) : 0.0f;
  TRACEA_UNROLL
  for (int j = 0; j < kPack; ++j) {
    const float d = sum[j] * share;
    squares[j] = fmaf(-sum[j], d, squares[j]);
    first[j] += d;
  }
  slab.merge(first, squares);

  // Of the groups.
  auto& shared = slab.shared();
  slab.for_each_group([&](int g) {
    constexpr float kShare = 1.0f / static_cast<float>(Traits::kGroup);
    const float mean =
        Slab::group_sum(g, [&](int c) { return shared.slab[0][c]; }) * kShare;
    const float all = Slab::group_sum(g, [&](int c) {
      const float d = shared.slab[0][c] - mean;
      return fmaf(d * d, static_cast<float>(p.rows), shared.slab[1][c]);
    });
    // Rounding may leave it below zero; NaN stays.
    const float variance = all < 0.0f ? 0.0f : all / static_cast<float>(p.rows) * kShare;
    const float inverse = 1.0f / sqrtf(variance + p.epsilon);
    if (threadIdx.x % kWarpSize == 0) {
      shared.groups[0][g] = mean;
      shared.groups[1][g] = inverse;
      if (slab.rank() == 0) {
        const i64 at = static_cast<i64>(slab.image()) * slab.groups() + slab.first_group() + g;
        p.mean[at] = mean;
        p.inverse[at] = inverse;
      }
    }
  });
  __syncthreads();

  float mean[kPack], scale[kPack], bias[kPack];
  if (slab.is_on()) {
    TRACEA_UNROLL
    for (int j = 0; j < kPack; ++j) {
      const int g = slab.local_channel(j) / Traits::kGroup, c = slab.channel() + j;
      mean[j] = shared.groups[0][g];
      scale[j] = shared.groups[1][g] * widen(static_cast<const Parameter*>(p.scale)[c]);
      bias[j] = widen(static_cast<const Parameter*>(p.bias)[c]);
    }
  }
  auto* y = static_cast<Element*>(p.y);
  slab.for_each(
      [&](int i, Pack<Element> v) {
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
          v.x[j] = activate<Traits::kActivation>(fmaf(v.x[j] - mean[j], scale[j], bias[j]));
        }
        store_pack(y + slab.address(i), v);
      },
      x);
  slab.leave();
}

}  // namespace tracea
