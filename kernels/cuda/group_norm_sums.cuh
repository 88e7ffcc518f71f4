// group_norm_sums: the first of two passes of a group norm, by parts of images: of each part
// and group, the mean over its pixels and channels, and the sum of squared distances from it.
//
// A part is to tile/slab.cuh an image of its own, whose one slab has all channels. Each thread
// takes the distances of its pixels from its first one, so that squares of a mean that is
// large do not drown the variance.
#pragma once

#include "tile/slab.cuh"

namespace tracea {

struct GroupNormSumsParams {
  const void* x;
  float *means, *squares;  // (images * parts, groups)
  int pixels, channels;    // of a part
  float epsilon;           // of the second pass
};

// Traits: those of NormSlab, of a cluster of one that keeps nothing.
template <class Traits>
TRACEA_DEVICE void group_norm_sums(const GroupNormSumsParams& p, u8* smem) {
  using Element = typename Traits::Element;
  using Slab = NormSlab<Traits>;
  constexpr int kPack = Slab::kPack;
  static_assert(Slab::kSharedBytes == Traits::kSharedBytes,
                "the launch must know the shared memory that is laid out here");
  Slab slab(smem, p.pixels, p.channels);
  const auto* x = static_cast<const Element*>(p.x);

  float first[kPack] = {}, sum[kPack] = {}, squares[kPack] = {};
  if (slab.count() > 0) {
    const Pack<Element> v = load_pack(x + slab.address(0));
    TRACEA_UNROLL
    for (int j = 0; j < kPack; ++j) first[j] = v.x[j];
  }
  slab.for_each(
      [&](int, const Pack<Element>& v) {
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
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

  auto& shared = slab.shared();
  slab.for_each_group([&](int g) {
    constexpr float kShare = 1.0f / static_cast<float>(Traits::kGroup);
    const float mean =
        Slab::group_sum(g, [&](int c) { return shared.slab[0][c]; }) * kShare;
    const float all = Slab::group_sum(g, [&](int c) {
      const float d = shared.slab[0][c] - mean;
      return fmaf(d * d, static_cast<float>(p.pixels), shared.slab[1][c]);
    });
    if (threadIdx.x % kWarpSize == 0) {
      const i64 at = static_cast<i64>(slab.image()) * slab.groups() + g;
      p.means[at] = mean;
      p.squares[at] = all;
    }
  });
}

}  // namespace tracea
