// The matrix product of bf16 operands on AMX tiles.
//
//   for column strip j     (nc wide)
//     for row strip i      (mc rows: as many as have their partial sums in L2)
//       for K block p      (kc deep)
//         pack rhs[p, j]   -> panels of 32 columns, in L2; once for all row strips
//         for row block    (32 rows)
//           for panel: tile product; beside it the epilogue of the panel before, and the
//                      lhs of the next row block comes closer or is packed
//
// Tile products occupy the matrix unit alone: what goes on beside them costs little. Stores
// cost most, so lhs is packed only where its tiles cannot be loaded from its rows, or where
// these are used often and would drive each other out of L1.
//
// Included by gemm/amx.cc inside an unnamed namespace, after common/amx_impl.h.

#include "common/activation_impl.h"
#include "common/block_loop_impl.h"
#include "common/workspace_impl.h"
#include "gemm/epilogue_impl.h"

constexpr int64_t kBlockSize = kAmxRows * kAmxCols;  // f32 sums of a block
constexpr int64_t kBlockLines = kBlockSize / 16;     // cache lines

// Buffers of one task.
struct AmxBuffers {
  float* staging;  // two blocks of sums
  float* bias;     // of a column strip
  BF16* lhs[2];    // row blocks of one K block, if packed: one in use, one on its way
  BF16* rhs;       // K blocks of panels: all of them if there are several row strips
  float* sums;     // partial sums, block by block; null unless there are several K blocks

  AmxBuffers(const GemmArgs& args, const GemmBlocks& blocks, Workspace& space) {
    staging = space.Take<float>(2 * kBlockSize);
    bias = space.Take<float>(blocks.nc);
    for (BF16*& rows : lhs) rows = space.Take<BF16>(kAmxRows * blocks.kc);
    rhs = space.Take<BF16>(blocks.rhs_depth * blocks.nc);
    const bool several = blocks.kc < args.k;
    sums = several ? space.Take<float>(blocks.mc * blocks.nc) : nullptr;
  }
};

int64_t AmxBytes(const GemmArgs& args, const GemmBlocks& blocks) {
  return BytesOf<AmxBuffers>(args, blocks);
}

TRACEA_INLINE Vec Join(const GemmArgs& args, Vec x, Vec residual) {
  return args.residual_op == ResidualOp::kMultiply ? x * residual : x + residual;
}

// Bias (or null), preactivation, activation, residual, store, for one row of a block:
// `cols` elements of the output at (i, j).
template <typename Op>
__attribute__((noinline)) void FinishRow(const GemmArgs& args, const float* sums,
                                         const float* bias, int64_t i, int64_t j,
                                         int64_t cols) {
  Vec low = Load(sums), high = Load(sums + kLanes);
  if (bias) {
    low += Load(bias);
    high += Load(bias + kLanes);
  }
  const int64_t to = i * args.out_stride + j;
  if (args.preactivation) {
    StorePair(args.out_type, args.preactivation, to, low, high, cols);
  }
  low = Op::Apply(low);
  high = Op::Apply(high);
  if (args.residual) {
    const int64_t from = i * args.residual_stride + j;
    low = Join(args, low, LoadAs(args.residual_type, args.residual, from, cols));
    if (cols > kLanes) {
      high = Join(args, high, LoadAs(args.residual_type, args.residual, from + kLanes,
                                     cols - kLanes));
    }
  }
  StorePair(args.out_type, args.out, to, low, high, cols);
}

// A block of sums whose epilogue is due, and how far it has come.
template <typename Op>
struct PendingBlock {
  const GemmArgs& args;
  const float* sums = nullptr;  // of the next row, kAmxCols f32
  const float* bias = nullptr;  // of the columns
  int64_t i = 0, j = 0;         // of the next row's first element, in the output
  int64_t rows = 0, cols = 0;   // left
  BF16* out = nullptr;          // the same element, if a row is whole and nothing but
                                // bias and activation is asked for

  TRACEA_INLINE void Set(const float* block, const float* its_bias, int64_t row,
                         int64_t column, int64_t num_rows, int64_t num_cols) {
    sums = block;
    bias = its_bias;
    i = row;
    j = column;
    rows = num_rows;
    cols = num_cols;
    const bool simple = cols == kAmxCols && args.out_type == DType::kBF16 &&
                        !args.preactivation && !args.residual;
    out = simple ? (BF16*)args.out + i * args.out_stride + j : nullptr;
    if (args.residual) PrefetchResidual();
  }

  // It is needed beside the next tile product.
  TRACEA_INLINE void PrefetchResidual() const {
    for (int64_t row = i; row < i + rows; ++row) {
      const int64_t at = row * args.residual_stride + j;
      PrefetchElements(args.residual, args.residual_type, at, cols);
    }
  }

  // Few instructions, so that they fit beside the tile products of a shallow block.
  TRACEA_INLINE void FinishSimple(int64_t count) {
    const Vec low_bias = bias ? Load(bias) : Vec{};
    const Vec high_bias = bias ? Load(bias + kLanes) : Vec{};
    const float* from = sums;
    BF16* to = out;
    for (int64_t r = 0; r < count; ++r) {
      const Vec low = Op::Apply(Load(from) + low_bias);
      const Vec high = Op::Apply(Load(from + kLanes) + high_bias);
      StoreHalves(to, (Half32)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
      from += kAmxCols;
      to += args.out_stride;
    }
    sums = from;
    out = to;
  }

  TRACEA_INLINE void Finish(int64_t most) {
    const int64_t count = Min(most, rows);
    rows -= count;
    if (out) return FinishSimple(count);
    for (int64_t r = 0; r < count; ++r) {
      FinishRow<Op>(args, sums, bias, i++, j, cols);
      sums += kAmxCols;
    }
  }
};

// Makes one row block of lhs ready for one K block, a little in every step of the tile
// products before: a burst of loads from memory would hold up those of the tiles. Whole
// rows of whole steps may be used as they are stored and only come closer; others are
// packed. Work is counted in lines of 32 elements; if lhs is stored by columns it comes 32
// of them at a time.
struct LhsFeed {
  bool packs;  // all of lhs
  const BF16* from = nullptr;
  BF16* to = nullptr;  // null if the block is used as it is stored
  int64_t stride = 0, rows = 0, kc = 0, steps = 0;
  int64_t row = 0, step = 0;  // of the next line
  int64_t due = 0;            // lines, if lhs is stored by columns
  bool trans = false;

  // `packed` has room for a block, in case it is needed.
  TRACEA_INLINE void Start(const GemmArgs& args, int64_t i, int64_t p, int64_t num_rows,
                           int64_t depth, BF16* packed) {
    const BF16* lhs = (const BF16*)args.lhs;
    trans = args.trans_lhs;
    stride = args.lhs_stride;
    from = trans ? lhs + p * stride + i : lhs + i * stride + p;
    to = packs || num_rows < kAmxRows || depth % kAmxDepth != 0 ? packed : nullptr;
    rows = num_rows;
    kc = depth;
    steps = CeilDiv(kc, kAmxDepth);
    row = step = due = 0;
  }

  TRACEA_INLINE int64_t lines() const { return kAmxRows * steps; }

  // The block, once all its lines have been fed.
  TRACEA_INLINE AmxLhs Lhs() const { return to ? PackedLhs(to) : StoredLhs(from, stride); }

  // `count` lines of the row that is due, which has as many.
  TRACEA_INLINE void FeedRow(int64_t count) {
    int64_t p = step * kAmxDepth;
    step += count;
    const BF16* at = from + row * stride;
    if (!to) {
      for (; count > 0; --count, p += kAmxDepth) __builtin_prefetch(at + p, 0, 2);
      return;
    }
    BF16* line = to + p / kAmxDepth * kAmxStepSize + row * kAmxDepth;
    for (; count > 0; --count, p += kAmxDepth, line += kAmxStepSize) {
      StoreHalves(line, LoadHalves(at + p, row < rows ? kc - p : 0));
    }
  }

  TRACEA_INLINE void FeedColumns(int64_t count) {
    for (due += count; due >= kAmxRows && step < steps; due -= kAmxRows, ++step) {
      const int64_t p = step * kAmxDepth;
      PackAmxLhsTransposed(from + p * stride, stride, rows, Min(kAmxDepth, kc - p),
                           to + step * kAmxStepSize);
    }
  }

  TRACEA_INLINE void Feed(int64_t count) {
    if (trans) return FeedColumns(count);
    while (count > 0 && row < kAmxRows) {
      const int64_t lines = Min(count, steps - step);
      FeedRow(lines);
      count -= lines;
      if (step == steps) {
        step = 0;
        ++row;
      }
    }
  }

  // What is left to be packed.
  TRACEA_INLINE void Complete() {
    if (to) Feed(lines());
  }
};

TRACEA_INLINE void PackRhsBlock(const GemmArgs& args, int64_t p, int64_t j, int64_t kc,
                                int64_t cols, BF16* packed) {
  const BF16* rhs = (const BF16*)args.rhs;
  if (args.trans_rhs) {
    PackAmxRhsTransposed(rhs + j * args.rhs_stride + p, args.rhs_stride, kc, cols, packed);
  } else {
    PackAmxRhs(rhs + p * args.rhs_stride + j, args.rhs_stride, kc, cols, packed);
  }
}

// A share of `count` lines of a block of sums that is written soon comes closer.
TRACEA_INLINE void PrefetchLines(const float* sums, int64_t share, int64_t count) {
  for (int64_t i = share * count; i < (share + 1) * count && i < kBlockLines; ++i) {
    __builtin_prefetch(sums + i * 16, 1);
  }
}

// `feed` is at work on the first row block of `block`; it leaves at work on the first row
// block of the block that comes after it, if `next` is not null.
template <typename Op>
void RunAmxBlock(const GemmArgs& args, const Block& block, const Block* next,
                 const BF16* rhs, const AmxBuffers& buffers, LhsFeed& feed) {
  const int64_t steps = CeilDiv(block.kc, kAmxDepth);
  const int64_t panels = CeilDiv(block.cols, kAmxCols);
  const bool several = !(block.first && block.last);
  const int64_t sums_share = steps > 0 ? CeilDiv(kBlockLines, steps) : 0;
  PendingBlock<Op> pending{args};
  int turn = 0;
  for (int64_t i = block.i0; i < block.i1; i += kAmxRows) {
    const int64_t rows = Min(kAmxRows, block.i1 - i);
    feed.Complete();
    const AmxLhs lhs = feed.Lhs();
    BF16* free = feed.to == buffers.lhs[0] ? buffers.lhs[1] : buffers.lhs[0];
    const int64_t i1 = i + kAmxRows;
    if (i1 < block.i1) {
      feed.Start(args, i1, block.p0, Min(kAmxRows, block.i1 - i1), block.kc, free);
    } else if (next) {
      feed.Start(args, next->i0, next->p0, Min(kAmxRows, next->i1 - next->i0), next->kc,
                 free);
    }
    const int64_t lhs_share = steps > 0 ? CeilDiv(feed.lines(), panels * steps) : 0;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t cols = Min(kAmxCols, block.cols - panel * kAmxCols);
      const int64_t at = (i - block.i0) / kAmxRows * panels + panel;
      float* sums = several ? buffers.sums + at * kBlockSize
                            : buffers.staging + (turn ^= 1) * kBlockSize;
      const int64_t due = CeilDiv(pending.rows, steps > 0 ? steps : 1);
      AmxBlockProduct(steps, rows, cols, lhs, rhs + panel * steps * kAmxStepSize, sums,
                      !block.first, [&](int64_t step) __attribute__((always_inline)) {
                        pending.Finish(due);
                        feed.Feed(lhs_share);
                        if (several) PrefetchLines(sums + kBlockSize, step, sums_share);
                      });
      if (!block.last) continue;
      pending.Finish(kAmxRows);
      const float* bias = args.bias ? buffers.bias + panel * kAmxCols : nullptr;
      pending.Set(sums, bias, i, block.j0 + panel * kAmxCols, rows, cols);
    }
  }
  pending.Finish(kAmxRows);
}

template <typename Op>
void RunAmx(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
            float* workspace) {
  Workspace space(workspace);
  const AmxBuffers buffers(args, blocks, space);
  const AmxScope scope;
  const int64_t nc = EqualWidth(range, blocks.nc, kAmxCols);
  const BlockLoop loop{range, args.k, blocks.kc, nc, blocks.mc};
  const bool kept = blocks.rhs_depth > blocks.kc;
  Block block = loop.First(), next;
  LhsFeed feed{blocks.packs_lhs};
  feed.Start(args, block.i0, block.p0, Min(kAmxRows, block.i1 - block.i0), block.kc,
             buffers.lhs[0]);
  for (bool more = true; more; block = next) {
    BF16* rhs = buffers.rhs + (kept ? block.p0 * nc : 0);
    const bool packed = block.i0 > range.m0 && (kept || (block.first && block.last));
    if (loop.BeginsStrip(block)) {
      LoadBias(args, block.j0, block.cols, buffers.bias);
    }
    if (!packed) PackRhsBlock(args, block.p0, block.j0, block.kc, block.cols, rhs);
    more = loop.Next(block, &next);
    RunAmxBlock<Op>(args, block, more ? &next : nullptr, rhs, buffers, feed);
  }
}

void RunAmxGemm(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
                float* workspace) {
  switch (args.activation) {
    case Activation::kNone:
      return RunAmx<Identity>(args, blocks, range, workspace);
    case Activation::kRelu:
      return RunAmx<Relu>(args, blocks, range, workspace);
    case Activation::kGelu:
      return RunAmx<Gelu>(args, blocks, range, workspace);
    case Activation::kGeluExact:
      return RunAmx<GeluExact>(args, blocks, range, workspace);
    case Activation::kSilu:
      return RunAmx<Silu>(args, blocks, range, workspace);
  }
}
