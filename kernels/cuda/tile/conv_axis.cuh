// How a sum over filter taps walks one axis of an image, and where its results lie.
//
// Result i of the axis, i < extent, is entry out_first + i out_step of the output, the sum
// over j < taps of
//
//   source[first + i stride + first_offset + j offset_step] * weight[first_tap + j tap_step]
//
// Offsets from the position first + i stride are never negative, as tensor maps need it. A
// convolution is one such walk an axis; the gradient of its input is one for each phase of
// the stride. tracea_jax/emit/conv_axes.py makes them, and proves them by brute force.
#pragma once

#include "tile/common.cuh"

namespace tracea {

struct ConvAxis {
  int extent;
  int first, stride;
  int taps, first_tap, tap_step;
  int first_offset, offset_step;
  int out_first, out_step;

  TRACEA_HOST_DEVICE constexpr int position(int i) const { return first + i * stride; }
  TRACEA_HOST_DEVICE constexpr int offset(int j) const {
    return first_offset + j * offset_step;
  }
  TRACEA_HOST_DEVICE constexpr int tap(int j) const { return first_tap + j * tap_step; }
  TRACEA_HOST_DEVICE constexpr int out(int i) const { return out_first + i * out_step; }
};

// Pixel `index` of all images of rows x columns results, in the order of memory.
struct Pixel {
  int image, row, column;

  TRACEA_HOST_DEVICE static constexpr Pixel at(u32 index, u32 rows, u32 columns) {
    const u32 line = index / columns, image = line / rows;
    return {static_cast<int>(image), static_cast<int>(line - image * rows),
            static_cast<int>(index - line * columns)};
  }
};

}  // namespace tracea
