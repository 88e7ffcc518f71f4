// group_norm_apply: the second of two passes of the norm of tile/norm.cuh, for each image and
// group: mean and inverse from those of its parts, see group_norm_sums.cuh, and y.
//
// A block has some rows of pixels of an image, all channels. Blocks begin with the pixels that
// the first pass has read last, which the L2 cache still has.
#pragma once

#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

struct GroupNormApplyParams {
  const void *x, *scale, *bias;
  const float *means, *squares;  // (images * parts, groups)
  void* y;
  float *mean, *inverse;  // of the deviation, (images, groups)
  int pixels, channels, parts;  // of an image
  int blocks, block_pixels;     // of an image; pixels of a block
  float epsilon;
};

// Traits: Element; Parameter, of scale and bias; kActivation; kGroup, channels of a group;
// kLanes, packs of a pixel; kThreads.
template <class Traits>
class GroupNormApply {
 public:
  using Element = typename Traits::Element;
  using Parameter = typename Traits::Parameter;
  static constexpr int kPack = Pack<Element>::kSize;
  static constexpr int kChannels = Traits::kLanes * kPack;
  static constexpr int kGroups = kChannels / Traits::kGroup;
  static constexpr int kRows = Traits::kThreads / Traits::kLanes;  // pixels at a time
  static constexpr int kWarps = Traits::kThreads / kWarpSize;
  static constexpr int kUnroll = 4;
  static_assert(kChannels % Traits::kGroup == 0 && kRows >= 1, "a thread has a pack of a pixel");

  struct Shared {
    float mean[kGroups], inverse[kGroups];
  };

  TRACEA_DEVICE static void run(const GroupNormApplyParams& p, Shared& shared) {
    const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int image = block / p.blocks, begin = block % p.blocks * p.block_pixels;
    const int end = begin + p.block_pixels < p.pixels ? begin + p.block_pixels : p.pixels;
    const int lane = static_cast<int>(threadIdx.x) % Traits::kLanes;
    const int row = static_cast<int>(threadIdx.x) / Traits::kLanes;
    const i64 offset = static_cast<i64>(image) * p.pixels * p.channels + lane * kPack;
    const auto* x = static_cast<const Element*>(p.x) + offset;
    auto* y = static_cast<Element*>(p.y) + offset;
    join_parts(p, image, begin == 0, shared);
    float mean[kPack], scale[kPack], bias[kPack];
    TRACEA_UNROLL
    for (int j = 0; j < kPack; ++j) {
      const int c = lane * kPack + j, g = c / Traits::kGroup;
      mean[j] = shared.mean[g];
      scale[j] = shared.inverse[g] * widen(static_cast<const Parameter*>(p.scale)[c]);
      bias[j] = widen(static_cast<const Parameter*>(p.bias)[c]);
    }
    TRACEA_NO_UNROLL
    for (int at = begin + row; row < kRows && at < end; at += kUnroll * kRows) {
      Words words[kUnroll];
      load(words, x, at, end, p.channels);
      TRACEA_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        const int pixel = at + i * kRows;
        if (pixel >= end) break;
        Pack<Element> v = Pack<Element>::from(words[i]);
        TRACEA_UNROLL
        for (int j = 0; j < kPack; ++j) {
          v.x[j] = activate<Traits::kActivation>(fmaf(v.x[j] - mean[j], scale[j], bias[j]));
        }
        store_pack(y + static_cast<i64>(pixel) * p.channels, v);
      }
    }
  }

 private:
  TRACEA_DEVICE static void load(Words (&words)[kUnroll], const Element* x, int at, int end,
                                 int channels) {
    TRACEA_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      const int pixel = at + i * kRows;
      if (pixel >= end) break;
      words[i] = *reinterpret_cast<const Words*>(x + static_cast<i64>(pixel) * channels);
    }
  }

  // Of all groups, each by a warp, whose lanes have some of the parts, all of as many pixels.
  TRACEA_DEVICE static void join_parts(const GroupNormApplyParams& p, int image, bool saves,
                                       Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float share = 1.0f / static_cast<float>(p.parts);
    const float count = static_cast<float>(p.pixels / p.parts) * Traits::kGroup;  // of a part
    for (int g = static_cast<int>(threadIdx.x) / kWarpSize; g < kGroups; g += kWarps) {
      const i64 first = static_cast<i64>(image) * p.parts * kGroups + g;
      float sum = 0.0f;
      for (int i = lane; i < p.parts; i += kWarpSize) sum += p.means[first + i * kGroups];
      const float mean = warp_sum(sum) * share;
      float all = 0.0f;
      for (int i = lane; i < p.parts; i += kWarpSize) {
        const float d = p.means[first + i * kGroups] - mean;
        all += fmaf(count * d, d, p.squares[first + i * kGroups]);
      }
      all = warp_sum(all);
      // Rounding may leave it below zero; NaN stays.
      const float variance = all < 0.0f ? 0.0f : all / (count * static_cast<float>(p.parts));
      const float inverse = 1.0f / sqrtf(variance + p.epsilon);
      if (lane == 0) {
        shared.mean[g] = mean;
        shared.inverse[g] = inverse;
        if (saves) {
          p.mean[image * kGroups + g] = mean;
          p.inverse[image * kGroups + g] = inverse;
        }
      }
    }
    __syncthreads();
  }
  TRACEA_DEVICE static float warp_sum(float v) {
    TRACEA_UNROLL
    for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, bit);
    return v;
  }
};

template <class Traits>
TRACEA_DEVICE void group_norm_apply(const GroupNormApplyParams& p) {
  __shared__ typename GroupNormApply<Traits>::Shared shared;
  GroupNormApply<Traits>::run(p, shared);
}

}  // namespace tracea
