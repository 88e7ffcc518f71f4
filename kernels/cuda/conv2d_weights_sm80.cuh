// conv2d_weights_sm80: partial sums of the gradient of a convolution's weights, on every GPU
// since sm_80,
//
//   partial[part, tap, c, k] = sum over the pixels of the part of x[pixel + tap, c] * dy[pixel, k]
//
// Rows of the product are taps and channels of x, its columns channels of dy, its depth
// pixels, which parts share evenly in whole tiles; groups and parts are a batch of such
// products. See tile/tap_copies.cuh and tile/mma_tile.cuh. Elements are bf16 or f16, or f32
// rounded to TF32; sums are f32.
//
// Assumes channels of a group in multiples of 16 bytes, and fewer than 2^31 pixels and tiles.
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "tile/async_copy.cuh"
#include "tile/common.cuh"
#include "tile/mma_tile.cuh"
#include "tile/pixel_fragments.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"
#include "tile/tap_copies.cuh"

namespace tracea {

struct ConvWeightsSm80Params {
  const void* x;
  const void* dy;
  PixelFragmentParams finish;  // channels of dy, and of one of its groups
  int images, groups, parts;
  int height, width, depth;  // of x, and its channels of a group
  DividedAxis h, w;
};

template <class Traits>
TRACEA_DEVICE void conv2d_weights_sm80(const ConvWeightsSm80Params& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  using Element = typename Traits::Element;
  using Shape = MmaTileShape<Traits>;
  using Raster = BandedRaster<Traits::kRasterBand>;
  using CopyA = TapCopy<Element, typename Traits::SwizzleA, Traits::kTileK, Traits::kTileM,
                        Shape::kThreads, Shape::kParts>;
  using CopyB = TileCopy<Element, typename Traits::SwizzleB, Traits::kTileK, Traits::kTileN,
                         false, kTapUnitBytes, Shape::kThreads, Shape::kParts>;
  constexpr int kUnit = kTapUnitBytes / static_cast<int>(sizeof(Element));

  const int rows = p.h.walk.taps * p.w.walk.taps * p.depth, group = p.finish.group;
  const Raster raster{ceil_div(rows, Traits::kTileM), ceil_div(group, Traits::kTileN)};
  const TileCoordinate at = raster.at(blockIdx.x);
  const int part = at.batch / p.groups, of_group = at.batch - part * p.groups;
  const int m = at.m * Traits::kTileM, n = at.n * Traits::kTileN;

  const int pixels = p.images * p.h.walk.extent * p.w.walk.extent;
  const int k_tiles = ceil_div(pixels, Traits::kTileK), share = ceil_div(k_tiles, p.parts);
  const int first = part * share, left = k_tiles - first;

  const int units = p.depth / kUnit;
  const UnitImages images{p.x, p.height, p.width, p.groups * units, of_group * units, units};
  CopyA copy_a(images, p.h, p.w, first * Traits::kTileK, pixels, m / kUnit);
  // Columns of the next group may be read and multiplied, and are not stored.
  CopyB copy_b(p.dy, pixels, p.finish.channels, first * Traits::kTileK, of_group * group + n);
  float sums[Shape::kBlocksM][2 * Shape::kBlocksN][4] = {};
  MmaTile<Traits, Borrowed<CopyA>, Borrowed<CopyB>>(smem_bytes, copy_a, copy_b)
      .add(sums, left < share ? left : share);

  const int column = n + Shape::first_column();
  PixelFragments<Traits, Shape::kBlocksM, 2 * Shape::kBlocksN> finish(
      p.finish, of_group * group + column, group - column);
  finish.store(sums, m + Shape::first_row(), rows,
               [&](int row) { return static_cast<i64>(part) * rows + row; });
}

}  // namespace tracea
