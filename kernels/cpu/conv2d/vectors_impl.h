// Convolutions for one instruction set: a matrix product whose lhs is gathered while it
// is packed.
//
//   for column strip j   (nc wide)
//     for row strip i    (mc rows: only if partial sums need a buffer of their own)
//       for block p      (kc deep)
//         pack weights[p, j]             -> panels [nc / kTileN][words][kTileN], in L2
//         for region of the images that sees the same taps
//           for row block                (up to kTileM rows)
//             copy windows[row block, p] -> [rows][words seen], in L1, if that pays
//             for panel: micro-kernel, and after the last block the epilogue
//
// Elements that are no words are converted while they are gathered, and packed for the
// micro-kernels of matrix products.
//
// Included by conv2d/<isa>.cc inside an unnamed namespace, after common/vec_impl.h and
// under the same rules, and so are the parts that it includes. The includer defines
// TRACEA_TILE_M, and TRACEA_WORDS_OF_BF16 if bf16 is multiplied in pairs.

#include "common/activation_impl.h"
#include "common/element_impl.h"
#include "common/tile_impl.h"
#include "common/pack_impl.h"
#include "conv2d/walk_impl.h"
#include "conv2d/gather_impl.h"
#include "conv2d/epilogue_impl.h"
#include "conv2d/tile_impl.h"
#include "conv2d/line_impl.h"
#include "conv2d/weight_impl.h"

static_assert(kTileM <= kMostRows, "windows of a whole tile must have room");

// Rows `stride` words apart, which are followed by others if `goes_on`.
TRACEA_INLINE void RunLine(const ConvProduct& product, const ConvBlock& block,
                           const ConvSums& partial, const ConvRows& rows,
                           const Pieces& pieces, const void* windows, int64_t stride,
                           bool goes_on, const float* weights, const float* bias) {
  const int64_t bytes = goes_on ? rows.count * stride * (int64_t)sizeof(float) : 0;
  const int64_t share = CeilDiv(bytes, CeilDiv(block.cols, kTileN));
  Ahead ahead{bytes, CeilDiv(share, Max(pieces.longest, 1))};
  for (int64_t c = 0; c < block.cols; c += kTileN, ahead.from += share) {
    const float* rhs = weights + c * WordsIn(block.depth);
    RunConvTile(product, block, partial, rows, c, bias,
                [&](int vecs, const float* src, int64_t src_stride, float* dst,
                    int64_t dst_stride) {
                  kLineKernels.table[vecs - 1][rows.count - 1](
                      pieces, (const float*)windows, stride, ahead, rhs, src, src_stride,
                      dst, dst_stride);
                });
  }
}

// Rows of a region that all see the same taps.
template <typename T>
void RunRegion(const ConvProduct& product, const ConvBlock& block,
               const ConvSums& partial, const ConvWorkspace& space, const float* bias,
               const Lines<T>& lines, const Region& region, const Region& taps,
               const Pieces& pieces) {
  if (pieces.count == 0 && !block.first && !block.last) return;
  const Pieces copied = Copied(pieces);
  const int64_t stride = product.x.step * product.pixel / kWordDepth;
  const auto line = [&](int64_t m, int64_t n, int64_t oy, int64_t ox, int64_t count) {
    int64_t row[kTileM], out[kTileM];
    Windows first;
    PlaceWindow(product, n, oy, ox, m, 0, &first);
    for (int64_t i = 0; i < count; ++i) {
      row[i] = m + i;
      out[i] = first.out[0] + i * product.x.out_step * product.out_pixel;
    }
    const T* seen = pieces.count > 0 ? FirstSeen<T>(product, first, 0, taps) : nullptr;
    RunLine(product, block, partial, ConvRows{row, out, count}, pieces, seen, stride,
            product.merges_taps(), space.rhs, bias);
  };
  const auto gather = [&](const Windows& windows, int64_t count) {
    CopyPieces<T>(product, windows, count, taps, pieces, lines);
    RunLine(product, block, partial, ConvRows{windows.row, windows.out, count}, copied,
            lines.data, lines.stride / kWordDepth, false, space.rhs, bias);
  };
  const bool reads_well = ReadsWell<T>(product, region.x.end - region.x.begin);
  WalkRows(product, block.m0, block.m1, region, reads_well ? region : Region{}, kTileM,
           true, line, gather);
}

// The part of a block's depth whose taps y are among those that are seen. All of it where
// a tap may begin within a word.
Interval DepthSeen(const ConvProduct& product, const ConvBlock& block,
                   const Interval& taps) {
  const int64_t line = product.x.taps * product.channels;
  if (line % kWordDepth != 0) return {block.p, block.p + block.depth};
  const int64_t begin = Max(block.p, taps.begin * line);
  return {begin, Max(begin, Min(block.p + block.depth, taps.end * line))};
}

// Rows of a region, whose lines all see the same taps y, converted while they are
// gathered. Taps on the sides of the image are zeros.
template <typename T>
void RunConverted(const ConvProduct& product, const ConvBlock& block,
                  const ConvSums& partial, const ConvWorkspace& space, const float* bias,
                  const Lines<T>& lines, const Region& region, const Interval& taps) {
  const Interval seen = DepthSeen(product, block, taps);
  const int64_t depth = seen.end - seen.begin;
  if (depth == 0 && !block.first && !block.last) return;
  const float* weights = space.rhs + WordsIn(seen.begin - block.p) * kTileN;
  const auto gather = [&](const Windows& windows, int64_t count) {
    PackWindows<T>(product, windows, count, seen.begin, depth, lines, space.lhs);
    RunPackedRows(product, block, partial, ConvRows{windows.row, windows.out, count},
                  WordsIn(depth), space.lhs, weights, bias);
  };
  WalkRows(product, block.m0, block.m1, region, Region{}, kTileM, true,
           [](int64_t, int64_t, int64_t, int64_t, int64_t) {}, gather);
}

template <typename T>
void RunConvBlock(const ConvProduct& product, const ConvBlock& block,
                  const ConvSums& partial, const ConvWorkspace& space,
                  const float* bias, int64_t kc) {
  const Lines<T> lines{(T*)space.lines, kc + kChunk};
  const bool words = kAreWords<T> && product.channels % kWordDepth == 0;
  ForEachTapsSeen(product.y, [&](const Interval& y, const Interval& taps_y) {
    if (!words) {
      const Region across{y, {0, product.x.rows}};
      return RunConverted(product, block, partial, space, bias, lines, across, taps_y);
    }
    ForEachTapsSeen(product.x, [&](const Interval& x, const Interval& taps_x) {
      const Region region{y, x}, taps{taps_y, taps_x};
      Pieces pieces;
      if (CutDepth(product, block, taps, &pieces)) {
        RunRegion(product, block, partial, space, bias, lines, region, taps, pieces);
      } else {
        RunConverted(product, block, partial, space, bias, lines, region, taps_y);
      }
    });
  });
}

// Whether rows of the product are consecutive pixels of the result.
bool InOrder(const ConvProduct& product) {
  return product.y.out_step == 1 && product.x.out_step == 1;
}

template <typename T>
void RunConvAs(const ConvProduct& product, const ConvBlocks& blocks,
               const ConvRange& range, float* memory) {
  const ConvWorkspace space(blocks, memory);
  const int64_t all = product.depth();
  const bool in_place = product.out_type == DType::kF32 && InOrder(product);
  const bool buffered = !in_place && blocks.kc < all;
  const int64_t mc = buffered ? blocks.mc : range.m1 - range.m0;
  // Strips of equal width: a narrow last one would use each gathered row too little.
  const int64_t width = range.n1 - range.n0;
  const int64_t nc =
      CeilDiv(CeilDiv(width, CeilDiv(width, blocks.nc)), kTileN) * kTileN;
  for (int64_t j = range.n0; j < range.n1; j += nc) {
    const int64_t cols = Min(nc, range.n1 - j);
    const float* bias = LoadConvBias(product, j, cols, space.bias);
    for (int64_t m = range.m0; m < range.m1; m += mc) {
      const int64_t m1 = Min(m + mc, range.m1);
      ConvSums partial{nullptr, 0, true};
      if (in_place) partial = {(float*)product.out, product.out_pixel, false};
      if (buffered) partial = {space.sums - m * nc - j, nc, true};
      int64_t p = 0;
      do {  // once if there is no depth: the epilogue of zero
        const int64_t depth = Min(blocks.kc, all - p);
        if (depth > 0) PackWeights<T>(product, p, depth, j, cols, space.rhs);
        const ConvBlock block{m, m1, j, cols, p, depth, p == 0, p + depth == all};
        RunConvBlock<T>(product, block, partial, space, bias, blocks.kc);
        p += depth;
      } while (p < all);
    }
  }
}
