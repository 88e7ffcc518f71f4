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
// TRACEA_TILE, and TRACEA_WORDS_OF_BF16 if bf16 is multiplied in pairs.

#include "common/activation_impl.h"
#include "common/block_loop_impl.h"
#include "common/element_impl.h"
#include "common/tile_impl.h"
#include "common/pack_impl.h"
#include "common/workspace_impl.h"
#include "conv2d/walk_impl.h"
#include "conv2d/gather_impl.h"
#include "conv2d/epilogue_impl.h"
#include "conv2d/tile_impl.h"
#include "conv2d/line_impl.h"
#include "conv2d/weight_impl.h"

static_assert(kTileM <= kMostRows, "windows of a whole tile must have room");

// Buffers of one task.
struct ConvWorkspace {
  ConvBuffers packed;
  float* lines;  // a block of rows as they are, `line_stride` elements apart
  int64_t line_stride;

  ConvWorkspace(const ConvProduct& product, const ConvBlocks& blocks, Workspace& space)
      : packed(blocks, BuffersSums(product, blocks, product.depth()), space),
        line_stride(blocks.kc + kChunk) {
    lines = space.Take<float>(kTileM * line_stride);
  }
};

int64_t ConvBytes(const ConvProduct& product, const ConvBlocks& blocks) {
  return BytesOf<ConvWorkspace>(product, blocks);
}

// Rows `stride` words apart, which are followed by others if `goes_on`.
TRACEA_INLINE void RunLine(const ConvProduct& product, const Block& block,
                           const ConvSums& partial, const ConvRows& rows,
                           const Pieces& pieces, const void* windows, int64_t stride,
                           bool goes_on, const float* weights, const float* bias) {
  const int64_t bytes = goes_on ? rows.count * stride * (int64_t)sizeof(float) : 0;
  const int64_t share = CeilDiv(bytes, CeilDiv(block.cols, kTileN));
  Ahead ahead{bytes, CeilDiv(share, Max(pieces.longest, 1))};
  for (int64_t c = 0; c < block.cols; c += kTileN, ahead.from += share) {
    const float* rhs = weights + c * WordsIn(block.kc);
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
void RunRegion(const ConvProduct& product, const Block& block,
               const ConvSums& partial, const ConvBuffers& space, const float* bias,
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
  WalkRows(product, block.i0, block.i1, region, reads_well ? region : Region{}, kTileM,
           true, line, gather);
}

// The part of a block's depth whose taps y are among those that are seen. All of it where
// a tap may begin within a word.
Interval DepthSeen(const ConvProduct& product, const Block& block,
                   const Interval& taps) {
  const int64_t line = product.x.taps * product.channels;
  if (line % kWordDepth != 0) return {block.p0, block.p0 + block.kc};
  const int64_t begin = Max(block.p0, taps.begin * line);
  return {begin, Max(begin, Min(block.p0 + block.kc, taps.end * line))};
}

// Rows of a region, whose lines all see the same taps y, converted while they are
// gathered. Taps on the sides of the image are zeros.
template <typename T>
void RunConverted(const ConvProduct& product, const Block& block,
                  const ConvSums& partial, const ConvBuffers& space, const float* bias,
                  const Lines<T>& lines, const Region& region, const Interval& taps) {
  const Interval seen = DepthSeen(product, block, taps);
  const int64_t depth = seen.end - seen.begin;
  if (depth == 0 && !block.first && !block.last) return;
  const float* weights = space.rhs + WordsIn(seen.begin - block.p0) * kTileN;
  const auto gather = [&](const Windows& windows, int64_t count) {
    PackWindows<T>(product, windows, count, seen.begin, depth, lines, space.lhs);
    RunPackedRows(product, block, partial, ConvRows{windows.row, windows.out, count},
                  WordsIn(depth), space.lhs, weights, bias);
  };
  WalkRows(product, block.i0, block.i1, region, Region{}, kTileM, true,
           [](int64_t, int64_t, int64_t, int64_t, int64_t) {}, gather);
}

template <typename T>
void RunConvBlock(const ConvProduct& product, const Block& block, const ConvSums& partial,
                  const ConvWorkspace& space, const float* bias) {
  const Lines<T> lines{(T*)space.lines, space.line_stride};
  const bool words = kAreWords<T> && product.channels % kWordDepth == 0;
  ForEachTapsSeen(product.y, [&](const Interval& y, const Interval& taps_y) {
    if (!words) {
      const Region across{y, {0, product.x.rows}};
      return RunConverted(product, block, partial, space.packed, bias, lines, across,
                          taps_y);
    }
    ForEachTapsSeen(product.x, [&](const Interval& x, const Interval& taps_x) {
      const Region region{y, x}, taps{taps_y, taps_x};
      Pieces pieces;
      if (CutDepth(product, block, taps, &pieces)) {
        RunRegion(product, block, partial, space.packed, bias, lines, region, taps,
                  pieces);
      } else {
        RunConverted(product, block, partial, space.packed, bias, lines, region, taps_y);
      }
    });
  });
}

template <typename T>
void RunConvAs(const ConvProduct& product, const ConvBlocks& blocks,
               const MatrixRange& range, float* memory) {
  Workspace counted(memory);
  const ConvWorkspace space(product, blocks, counted);
  const ConvBuffers& packed = space.packed;
  const int64_t nc = EqualWidth(range, blocks.nc, kTileN);
  const int64_t mc = packed.sums ? blocks.mc : range.m1 - range.m0;
  const BlockLoop loop{range, product.depth(), blocks.kc, nc, mc};
  const float* bias = nullptr;
  loop.ForEach([&](const Block& block) {
    if (loop.BeginsStrip(block)) {
      bias = LoadConvBias(product, block.j0, block.cols, packed.bias);
    }
    if (block.kc > 0) {
      PackWeights<T>(product, block.p0, block.kc, block.j0, block.cols, packed.rhs);
    }
    RunConvBlock<T>(product, block, SumsOf(product, packed, block, nc), space, bias);
  });
}
