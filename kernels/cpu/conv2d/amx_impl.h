// Convolutions of bf16 on AMX tiles.
//
//   for column strip j      (nc wide)
//     for row strip m       (mc rows: as many as have their partial sums in L2)
//       for block of steps  (kc deep)
//         pack weights      -> panels of 32 columns, in L2
//         for lines of the images that see the same lines of taps
//           for row block   (32 rows)
//             for panel: tile product; beside it the epilogue of the panel before
//
// Tiles are loaded from the image as it is, if its lines fill them; else from lines of it
// that are copied with their padding (a strip); else from windows that are brought into
// the order of tiles one by one.
//
// Included by conv2d/amx.cc inside an unnamed namespace, after common/amx_impl.h.

#include "common/activation_impl.h"
#include "common/block_loop_impl.h"
#include "common/element_impl.h"
#include "common/workspace_impl.h"
#include "conv2d/walk_impl.h"
#include "conv2d/strip_impl.h"
#include "conv2d/amx_steps_impl.h"
#include "conv2d/amx_epilogue_impl.h"

static_assert(kAmxRows <= kMostRows, "windows of a whole block must have room");

constexpr int64_t kBlockSize = kAmxRows * kAmxCols;  // f32 sums of a block
constexpr int64_t kMostSums = int64_t{1} << 20;      // bytes of a row strip: L2

// The fewest rows of a block of rows in a line or strip, but for those at the ends.
constexpr int64_t kLeastRows = kAmxRows / (1 + kMostUseless);
static_assert(kLeastRows <= kFewestRows, "a strip of one line may be one block");

// The most blocks of rows that `rows` rows are cut into. Each part of the images that sees
// the same lines of taps ends with a block of fewer rows.
int64_t MostRowBlocks(const ConvProduct& product, int64_t rows) {
  return rows / kLeastRows + 8 + 2 * product.y.taps;
}

// Buffers of one task.
struct AmxConvBuffers {
  float* staging;  // two blocks of sums
  float* bias;     // of a column strip
  BF16* lhs;       // a block of rows, packed
  BF16* rhs;       // a block of the weights, packed
  BF16* strip;     // of the image
  float* sums;     // partial sums, block by block; null unless there are several blocks
                   // of depth

  AmxConvBuffers(const ConvProduct& product, const ConvBlocks& blocks, Workspace& space) {
    staging = space.Take<float>(2 * kBlockSize);
    bias = space.Take<float>(blocks.nc);
    lhs = space.Take<BF16>(kAmxRows * blocks.kc);
    rhs = space.Take<BF16>(blocks.kc * blocks.nc);
    strip = space.Take<BF16>(kStripSize);
    const bool several = AllSteps(product) > blocks.kc / kAmxDepth;
    const int64_t row_blocks = MostRowBlocks(product, blocks.mc);
    sums = several ? space.Take<float>(row_blocks * kAmxRows * blocks.nc) : nullptr;
  }
};

int64_t AmxConvBytes(const ConvProduct& product, const ConvBlocks& blocks) {
  return BytesOf<AmxConvBuffers>(product, blocks);
}

// Windows in the image, side by side, as the tiles are loaded from it.
struct AmxWindows {
  const BF16* image;
  int64_t begin;  // elements before the first window, which may begin outside
  const int64_t* offset;
  int64_t stride, lower;  // bytes

  TRACEA_INLINE const char* At(int64_t step) const {
    return (const char*)(image + (begin + offset[step]));
  }
};

// Whether reading the image as it is pays: lines must fill their tiles, and rows of a
// tile must not lie multiples of a page apart, where all need the same few lines of L1.
bool FillsTiles(const ConvProduct& product) {
  const Interval inside = InteriorOf(product.x);
  const int64_t count = inside.end - inside.begin;
  const int64_t bytes = product.x.step * product.pixel * (int64_t)sizeof(BF16);
  const bool whole = RunsFrom(product, 0).length % kAmxDepth == 0;
  return whole && bytes % 4096 != 0 && count > 0 &&
         10 * count >= 9 * 16 * CeilDiv(count, 16);
}

template <typename Op>
struct AmxConvRows {
  const ConvProduct& product;
  const Block& block;
  const Steps& steps;
  const AmxConvBuffers& buffers;
  SeenSteps seen{0, 0, 0};  // by the rows that come
  PendingRows<Op> pending{product};
  int64_t out[2][kAmxRows] = {};  // of the rows at work and of the pending ones
  int which = 0, turn = 0;
  int64_t done = 0;  // blocks of sums

  template <typename Lhs>
  __attribute__((noinline)) void Multiply(const Lhs& lhs, int64_t rows) {
    for (int64_t c = 0; c < block.cols; c += kAmxCols, ++done) {
      const int64_t cols = Min(kAmxCols, block.cols - c);
      float* sums = buffers.sums ? buffers.sums + done * kBlockSize
                                 : buffers.staging + (turn ^= 1) * kBlockSize;
      const int64_t due = CeilDiv(pending.rows, Max(seen.count, 1));
      const int64_t panel = c / kAmxCols * steps.count;
      const BF16* rhs = buffers.rhs + (panel + seen.first) * kAmxStepSize;
      AmxBlockProduct(seen.count, rows, cols, lhs, rhs, sums, !block.first,
                      [&](int64_t)
                          __attribute__((always_inline)) { pending.Finish(due); });
      if (!block.last) continue;
      pending.Finish(kAmxRows);
      const float* bias = product.bias ? buffers.bias + c : nullptr;
      pending.Set(sums, bias, out[which], rows, block.j0 + c, cols);
    }
  }

  void Gather(const Windows& windows, int64_t rows) {
    which ^= 1;
    for (int64_t i = 0; i < rows; ++i) {
      out[which][i] = windows.out[i];
      GatherSteps(product, steps, seen, windows, i, buffers.lhs + i * kAmxDepth);
    }
    Multiply(PackedLhs(buffers.lhs), rows);
  }

  void Line(int64_t m, int64_t n, int64_t oy, int64_t ox, int64_t rows) {
    Windows windows;
    PlaceWindow(product, n, oy, ox, m, 0, &windows);
    const int64_t apart = product.x.step * product.pixel;
    const int64_t pixel = windows.image[0] + windows.y[0] * product.x.size + windows.x[0];
    const int64_t begin = pixel * product.pixel;
    // A tile has 16 rows, whether all are wanted or not.
    const int64_t read = begin + (CeilDiv(rows, 16) * 16 - 1) * apart + seen.last;
    const int64_t size = product.batch * product.y.size * product.x.size * product.pixel;
    if (read + kAmxDepth > size - (product.pixel - product.channels)) {
      for (int64_t i = 1; i < rows; ++i) {
        PlaceWindow(product, n, oy, ox + i, m + i, i, &windows);
      }
      return Gather(windows, rows);
    }
    which ^= 1;
    for (int64_t i = 0; i < rows; ++i) {
      out[which][i] = windows.out[0] + i * product.x.out_step * product.out_pixel;
    }
    const AmxWindows lhs{(const BF16*)product.image, begin, steps.offset + seen.first,
                         2 * apart, 32 * apart};
    Multiply(lhs, rows);
  }

  // Makes the strip that lines [y.begin, y.end) of image n read, and sets where in it a
  // step begins.
  void FillStrip(const StripShape& shape, int64_t n, const Interval& y, int64_t* offset) {
    if (seen.count == 0) return;
    const ConvAxis& axis = product.y;
    const int64_t end = seen.first + seen.count, lines = y.end - y.begin;
    const int64_t first = steps.ty[seen.first] * axis.tap_step;
    const int64_t last = steps.ty[end - 1] * axis.tap_step - first;
    const int64_t depth = lines + last / axis.step;
    for (int64_t s = seen.first; s < end; ++s) {
      const int64_t l = steps.ty[s] * axis.tap_step - first;
      offset[s] = (l % axis.step * depth + l / axis.step) * shape.line + steps.strip[s];
    }
    CopyStrip(product, shape, n, y.begin * axis.step + axis.offset + first,
              (lines - 1) * axis.step + last + 1, depth, buffers.strip);
  }

  // Lines [y.begin, y.end) of image n, from row `begin` of the first one to row `end` of
  // the last one.
  void Strip(const StripShape& shape, int64_t n, const Interval& y, int64_t begin,
             int64_t end) {
    int64_t offset[kMostSteps];
    FillStrip(shape, n, y, offset);
    end += (y.end - 1 - y.begin) * shape.across;
    int64_t oy = y.begin, ox = begin;
    for (int64_t f = begin; f < end; f += kAmxRows) {
      const int64_t rows = Min(kAmxRows, end - f);
      which ^= 1;
      for (int64_t i = 0; i < rows; ++i) {
        out[which][i] = ox < product.x.rows ? OutOf(product, n, oy, ox) : -1;
        if (++ox < shape.across) continue;
        ox = 0;
        ++oy;
      }
      const AmxWindows lhs{buffers.strip, f * shape.row, offset + seen.first,
                           2 * shape.row, 32 * shape.row};
      Multiply(lhs, rows);
    }
  }

  // The block's rows in the lines `y` of the images, all of which see the lines `taps`.
  void RunStrips(const StripShape& shape, const Interval& y, const Interval& taps) {
    seen = StepsOf(steps, taps);
    const int64_t across = product.x.rows, image = product.y.rows * across;
    for (int64_t n = block.i0 / image; n * image < block.i1; ++n) {
      const int64_t m0 = Max(block.i0 - n * image, y.begin * across);
      const int64_t m1 = Min(block.i1 - n * image, y.end * across);
      for (int64_t m = m0; m < m1;) {
        const int64_t line = m / across;
        const int64_t next = Min((line + shape.most) * across, m1);
        const int64_t last = (next - 1) / across;
        Strip(shape, n, {line, last + 1}, m - line * across, next - last * across);
        m = next;
      }
    }
  }

  // The same without strips.
  void Run(const Interval& y, const Interval& taps, bool in_place) {
    seen = StepsOf(steps, taps);
    const Region region{y, {0, product.x.rows}};
    const Region whole = in_place ? Region{y, InteriorOf(product.x)} : Region{};
    WalkRows(
        product, block.i0, block.i1, region, whole, kAmxRows, false,
        [&](int64_t m, int64_t n, int64_t oy, int64_t ox, int64_t count) {
          Line(m, n, oy, ox, count);
        },
        [&](const Windows& windows, int64_t count) { Gather(windows, count); });
  }
};

template <typename Op>
void RunAmxConvWith(const ConvProduct& product, const ConvBlocks& blocks,
                    const MatrixRange& range, float* memory) {
  Workspace space(memory);
  const AmxConvBuffers buffers(product, blocks, space);
  const AmxScope scope;
  const int64_t all = AllSteps(product);
  const bool in_place = all > 0 && FillsTiles(product);
  const int64_t mc = buffers.sums ? blocks.mc : range.m1 - range.m0;
  const int64_t nc = EqualWidth(range, blocks.nc, kAmxCols);
  const StripShape shape = StripShapeOf(product);
  const bool in_strips =
      all > 0 && !in_place && PaysInStrips(product, shape, CeilDiv(nc, kAmxCols));
  Steps steps;
  const BlockLoop loop{range, all, blocks.kc / kAmxDepth, nc, mc};  // in steps
  loop.ForEach([&](const Block& block) {
    if (loop.BeginsStrip(block)) LoadConvBias(product, block, buffers.bias);
    CutSteps(product, block.p0, block.kc, &steps);
    PackSteps(product, steps, block.j0, block.cols, buffers.rhs);
    AmxConvRows<Op> rows{product, block, steps, buffers};
    ForEachTapsSeen(product.y, [&](const Interval& y, const Interval& taps) {
      if (in_strips) {
        rows.RunStrips(shape, y, taps);
      } else {
        rows.Run(y, taps, in_place);
      }
    });
    rows.pending.Finish(kAmxRows);
  });
}

void RunAmxConv(const ConvProduct& product, const ConvBlocks& blocks,
                const MatrixRange& range, float* workspace) {
  switch (product.activation) {
    case Activation::kNone:
      return RunAmxConvWith<Identity>(product, blocks, range, workspace);
    case Activation::kRelu:
      return RunAmxConvWith<Relu>(product, blocks, range, workspace);
    case Activation::kGelu:
      return RunAmxConvWith<Gelu>(product, blocks, range, workspace);
    case Activation::kGeluExact:
      return RunAmxConvWith<GeluExact>(product, blocks, range, workspace);
    case Activation::kSilu:
      return RunAmxConvWith<Silu>(product, blocks, range, workspace);
  }
}
