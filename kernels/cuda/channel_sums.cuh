// channel_sums: two sums over the rows of a matrix, for each channel, in one pass:
//
//   moments:   sum x,      sum x^2
//   gradient:  sum dz,     sum dz (x - center)
//
// with dz = dy, or, of a relu, dy where (x - center) factor + shift > 0, rounded to an element.
// Each block adds a range of rows; `parts`, of (gridDim.x, 2, channels), are to be added by what comes next. All
// sums are of f32, in an order that is always the same.
//
// Assumes that the channels are a multiple of a pack's, and arrays aligned to 16 bytes.
#pragma once

#include "norm/block_columns.cuh"
#include "norm/pack.cuh"
#include "tile/common.cuh"

namespace tracea {

struct ChannelSumsParams {
  const void* x;
  const void* dy;
  const float* center;
  const float* factor;
  const float* shift;
  float* parts;
};

// Traits: Element; kThreads, kLanes (see norm/block_columns.cuh), kUnroll (rows of a thread in
// flight), kIsGradient, kHasRelu, kLeast (the largest f32 that rounds to zero in an element).
template <class Traits>
TRACEA_DEVICE void channel_sums(const ChannelSumsParams& p, int rows, int channels) {
  using Element = typename Traits::Element;
  using Packed = Pack<Element>;
  using Columns = BlockColumns<Element, Traits::kThreads, Traits::kLanes>;
  constexpr int kCount = Packed::kCount, kUnroll = Traits::kUnroll;
  const Columns at(rows, channels);
  float sums[2][kCount] = {};
  float center[kCount], factor[kCount], shift[kCount];
  if (at.begin < at.end) {
    if constexpr (Traits::kIsGradient) load_each(p.center + at.pack * kCount, center);
    if constexpr (Traits::kHasRelu) {
      load_each(p.factor + at.pack * kCount, factor);
      load_each(p.shift + at.pack * kCount, shift);
    }
  }
  const Element* x = static_cast<const Element*>(p.x) + at.first;
  const Element* dy = static_cast<const Element*>(p.dy) + at.first;
  for (int row = at.begin; row < at.end; row += kUnroll * Columns::kRows) {
    Packed entries[kUnroll], gradients[kUnroll];
    TRACEA_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * Columns::kRows < at.end) {
        entries[u] = Packed::load(x + u * at.step);
        if constexpr (Traits::kIsGradient) gradients[u] = Packed::load(dy + u * at.step);
      }
    }
    TRACEA_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      if (row + u * Columns::kRows >= at.end) continue;
      float v[kCount], d[kCount];
      entries[u].widen(v);
      if constexpr (Traits::kIsGradient) gradients[u].widen(d);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if constexpr (Traits::kIsGradient) {
          v[i] -= center[i];
          if constexpr (Traits::kHasRelu) {
            // Selected, not multiplied: what relu cuts off may be inf or NaN.
            d[i] = fmaf(v[i], factor[i], shift[i]) > Traits::kLeast ? d[i] : 0.0f;
          }
          sums[0][i] += d[i];
          sums[1][i] = fmaf(d[i], v[i], sums[1][i]);
        } else {
          sums[0][i] += v[i];
          sums[1][i] = fmaf(v[i], v[i], sums[1][i]);
        }
      }
    }
    x += kUnroll * at.step;
    dy += kUnroll * at.step;
  }
  float* out = p.parts + static_cast<i64>(blockIdx.x) * 2 * channels;
  store_column_sums<Columns, Traits::kThreads, Traits::kLanes>(sums, out, channels);
}

}  // namespace tracea
