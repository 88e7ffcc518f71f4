// conv2d_sm80: a convolution as an implicit product, on every GPU since sm_80.
//
//   out[pixel, k] = activation(sum over taps and channels c of
//                       source[pixel + tap, c] * w[tap, c, k] + bias[k] + residual[pixel, k])
//
// Rows of the product are pixels, its depth runs over taps and their channels, its columns
// over the channels of the result; groups are a batch of such products. The operands are
// gathered by tile/tap_copies.cuh and multiplied by tile/mma_tile.cuh. Elements are bf16 or
// f16, or f32 rounded to TF32; sums are f32.
//
// The gradient of the input is the same with transposed weights (kTransposesWeights). Where
// the convolution has a stride it has phases, the pixels that the same taps reach; their
// tiles follow one another, and a phase without taps is zeros. See tile/conv_axis.cuh.
//
// Assumes channels of a group in multiples of 16 bytes, and fewer than 2^31 pixels and
// tiles. PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "tile/async_copy.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/fast_divide.cuh"
#include "tile/mma_tile.cuh"
#include "tile/pixel_fragments.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"
#include "tile/tap_copies.cuh"

namespace tracea {

template <class Traits>
struct ConvSm80Params {
  const void* source;
  const void* w;
  PixelFragmentParams finish;
  int images, groups;
  int height, width, depth;  // of the source, and its channels of a group
  int kernel_width;
  DividedAxis h[Traits::kPhasesH], w_axis[Traits::kPhasesW];
};

template <class Traits>
class ConvSm80 {
 public:
  using Params = ConvSm80Params<Traits>;
  using Element = typename Traits::Element;
  using Shape = MmaTileShape<Traits>;
  using Raster = BandedRaster<Traits::kRasterBand>;
  using CopyA = PixelCopy<Element, typename Traits::SwizzleA, Traits::kTileM, Traits::kTileK,
                          Shape::kThreads, Shape::kParts>;
  static constexpr int kUnit = kTapUnitBytes / static_cast<int>(sizeof(Element));

  TRACEA_DEVICE ConvSm80(const Params& params, u8* smem) : p_(params), smem_(smem) {}

  TRACEA_DEVICE void run() const {
    u32 tile = blockIdx.x;
    bool found = false;
    DividedAxis h = p_.h[0], w = p_.w_axis[0];
    TRACEA_UNROLL
    for (int i = 0; i < Traits::kPhasesH; ++i) {
      TRACEA_UNROLL
      for (int j = 0; j < Traits::kPhasesW; ++j) {
        if (found) continue;
        h = p_.h[i];
        w = p_.w_axis[j];
        const u32 tiles = tile_count(pixels(h, w));
        found = tile < tiles;
        if (!found) tile -= tiles;
      }
    }
    const Raster raster{ceil_div(pixels(h, w), Traits::kTileM), n_tiles()};
    compute(h, w, raster.at(tile));
  }

 private:
  TRACEA_DEVICE int pixels(const DividedAxis& h, const DividedAxis& w) const {
    return p_.images * h.walk.extent * w.walk.extent;
  }
  TRACEA_DEVICE int n_tiles() const { return ceil_div(p_.finish.group, Traits::kTileN); }
  TRACEA_DEVICE u32 tile_count(int pixels) const {
    return static_cast<u32>(ceil_div(pixels, Traits::kTileM)) * n_tiles() * p_.groups;
  }

  TRACEA_DEVICE void compute(const DividedAxis& h, const DividedAxis& w,
                             TileCoordinate at) const {
    const int group = p_.finish.group;  // channels of the result
    const int count = pixels(h, w);
    const int m = at.m * Traits::kTileM, n = at.n * Traits::kTileN;
    const int units = p_.depth / kUnit;
    TapWalk walk(h.walk, w.walk, units, CopyA::first_unit());
    const UnitImages images{p_.source, p_.height, p_.width, p_.groups * units,
                            at.batch * units, units};
    CopyA copy_a(images, h, w, m, count, walk);
    const int depth = h.walk.taps * w.walk.taps * p_.depth;
    float sums[Shape::kBlocksM][2 * Shape::kBlocksN][4] = {};
    if constexpr (Traits::kTransposesWeights) {
      using CopyB = TapWeightsCopy<Element, typename Traits::SwizzleB, Traits::kTileN,
                                   Traits::kTileK, Shape::kThreads, Shape::kParts>;
      CopyB copy_b(p_.w, p_.kernel_width, group, images.pitch, n, images.first, walk);
      MmaTile<Traits, Borrowed<CopyA>, Borrowed<CopyB>>(smem_, copy_a, copy_b)
          .add(sums, ceil_div(depth, Traits::kTileK));
    } else {
      // Columns of the next group may be read and multiplied, and are not stored.
      using CopyB = TileCopy<Element, typename Traits::SwizzleB, Traits::kTileK,
                             Traits::kTileN, false, kTapUnitBytes, Shape::kThreads,
                             Shape::kParts>;
      CopyB copy_b(p_.w, depth, p_.finish.channels, 0, at.batch * group + n);
      MmaTile<Traits, Borrowed<CopyA>, Borrowed<CopyB>>(smem_, copy_a, copy_b)
          .add(sums, ceil_div(depth, Traits::kTileK));
    }
    const int row = m + Shape::first_row(), column = n + Shape::first_column();
    PixelFragments<Traits, Shape::kBlocksM, 2 * Shape::kBlocksN> finish(
        p_.finish, at.batch * group + column, group - column);
    finish.store(sums, row, count, [&](int index) {
      if constexpr (!Traits::kScatters) return static_cast<i64>(index);
      const Pixel at = pixel_of(h, w, index);
      return (static_cast<i64>(at.image) * p_.finish.rows + h.walk.out(at.row)) *
                 p_.finish.columns +
             w.walk.out(at.column);
    });
  }

  const Params& p_;
  u8* const smem_;
};

template <class Traits>
TRACEA_DEVICE void conv2d_sm80(const ConvSm80Params<Traits>& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  ConvSm80<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
