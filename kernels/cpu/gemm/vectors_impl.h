// The matrix product for one instruction set: packing, micro-kernels, epilogue, loops.
//
//   for column strip j   (nc wide)
//     for row strip i    (mc rows: only if partial sums need a buffer of their own)
//       for K block p    (kc deep)
//         pack rhs[p, j]                 -> panels [nc / kTileN][words][kTileN], in L2
//         for row block                  (up to kTileM rows)
//           pack lhs[row block, p]       -> chunks [words / kChunk][rows][kChunk], in L1,
//                                           or [words][kLhsStep] if stored by columns
//           for panel: micro-kernel, and after the last K block the epilogue
//
// Packing words that are stored by rows costs little, because micro-kernels pack the next
// row block of lhs and the next block of rhs beside their products (`Feeds`).
//
// Packing converts to words (f32, or pairs of bf16: common/word_impl.h). rhs is transposed
// if it is stored by columns; lhs is packed as it is stored, for micro-kernels take single
// words of it in either order. Row blocks are as equal as possible and there is a
// micro-kernel for every row count, so ragged rows cost no wasted work; a ragged last panel
// is padded with zeros.
//
// Included by gemm/<isa>.cc inside an unnamed namespace, after common/vec_impl.h and under
// the same rules, and so are the parts that it includes. The includer defines
// TRACEA_TILE, and TRACEA_WORDS_OF_BF16 if bf16 is multiplied in pairs.

#include "common/activation_impl.h"
#include "common/block_loop_impl.h"
#include "common/tile_impl.h"
#include "common/pack_impl.h"
#include "common/workspace_impl.h"
#include "gemm/epilogue_impl.h"

template <typename T>
void PackLhsBlock(const GemmArgs& args, int64_t i, int64_t p, int64_t rows, int64_t kc,
                  float* packed) {
  const T* lhs = (const T*)args.lhs;
  if (args.trans_lhs) {
    PackLhsColumns(lhs + p * args.lhs_stride + i, args.lhs_stride, args.m - i, kc, packed);
  } else {
    PackLhs(lhs + i * args.lhs_stride + p, args.lhs_stride, rows, kc, packed);
  }
}

template <typename T>
void PackRhsBlock(const GemmArgs& args, int64_t p, int64_t j, int64_t kc, int64_t cols,
                  float* packed) {
  const T* rhs = (const T*)args.rhs;
  if (args.trans_rhs) {
    PackRhsTransposed(rhs + j * args.rhs_stride + p, args.rhs_stride, kc, cols, packed);
  } else {
    PackRhs(rhs + p * args.rhs_stride + j, args.rhs_stride, kc, cols, packed);
  }
}

// f32 sums between K blocks: element (i, j) of the output at data[i * stride + j].
struct Partial {
  float* data;
  int64_t stride;
  bool padded;  // whole tiles may be written, beyond the last column
};

bool IsPlain(const GemmArgs& args) {
  return args.out_type == DType::kF32 && args.activation == Activation::kNone &&
         !args.bias && !args.residual && !args.preactivation;
}

void CopyColumns(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                 int64_t rows, int64_t cols) {
  for (int64_t row = 0; row < rows; ++row) {
    memcpy(to + row * to_stride, from + row * from_stride, cols * sizeof(float));
  }
}

// Brings closer what the epilogue of a tile will read.
TRACEA_INLINE void PrefetchResidual(const GemmArgs& args, int64_t i, int64_t j,
                                    int64_t rows, int64_t cols) {
  for (int64_t row = i; row < i + rows; ++row) {
    const int64_t at = row * args.residual_stride + j;
    PrefetchElements(args.residual, args.residual_type, at, cols);
  }
}

// The register tile at (i, j0 + c): product, then partial store or epilogue.
TRACEA_INLINE void RunTile(const GemmArgs& args, const Block& block,
                           const Partial& partial, int64_t i, int64_t rows, int64_t c,
                           const float* lhs, const float* rhs, const float* bias,
                           Feeds* feeds) {
  alignas(64) float buffer[kTileM * kTileN];
  const int64_t cols = Min(kTileN, block.cols - c);
  const int64_t j = block.j0 + c;
  const int64_t words = WordsIn(block.kc);
  const bool whole = cols == kTileN || partial.padded;
  float* sums = partial.data ? partial.data + i * partial.stride + j : nullptr;
  const LhsOrder order = args.trans_lhs ? kByColumn : kByRow;
  const MicroKernelFn micro = MicroKernelFor(order, rows, cols);
  if (block.last && args.residual) PrefetchResidual(args, i, j, rows, cols);

  const float* src = block.first ? nullptr : sums;
  int64_t src_stride = partial.stride;
  if (src && !whole) {
    CopyColumns(sums, partial.stride, buffer, kTileN, rows, cols);
    src = buffer;
    src_stride = kTileN;
  }
  const bool direct = whole && (block.last ? cols == kTileN && IsPlain(args) : true);
  if (direct) {
    micro(words, lhs, rhs, src, src_stride, sums, partial.stride, feeds);
    return;
  }
  micro(words, lhs, rhs, src, src_stride, buffer, kTileN, feeds);
  if (block.last) {
    Finish(args, Tile{buffer, kTileN, i, j, rows, cols}, bias ? bias + c : nullptr);
  } else {
    CopyColumns(buffer, kTileN, sums, partial.stride, rows, cols);
  }
}

// Rows of lhs that are packed together, for one K block.
struct LhsRows {
  int64_t i, rows, p, kc;
};

// Whether rows are packed beside the products: they must be whole words already.
template <typename T>
TRACEA_INLINE constexpr bool IsFed(bool trans, int64_t kc) {
  return kAreWords<T> && !trans && kc % kWordDepth == 0;
}

// `rows` rows of `count` elements as they are stored: they only come closer, or they are
// packed, up to a rest below a unit.
template <int kUnit, int kDeep, typename T>
TRACEA_INLINE RowFeed<kUnit, kDeep> FeedRows(const T* from, int64_t stride, int64_t rows,
                                             int64_t count, float* to, int64_t to_unit) {
  RowFeed<kUnit, kDeep> feed;
  const int64_t bytes = count * (int64_t)sizeof(T);
  feed.from = (const char*)from;
  feed.to = to;
  feed.stride = stride * (int64_t)sizeof(T);
  feed.to_unit = to ? to_unit : 0;
  feed.end = Min(bytes, feed.kUnitBytes) - 1;
  feed.units = to ? bytes / feed.kUnitBytes : CeilDiv(bytes, feed.kUnitBytes);
  feed.rows = feed.units > 0 ? CeilDiv(rows, kDeep) : 0;
  return feed;
}

template <typename T>
TRACEA_INLINE RowFeed<kChunk, 1> FeedLhs(const GemmArgs& args, const LhsRows& part,
                                         float* packed) {
  const T* lhs = (const T*)args.lhs;
  const int64_t stride = args.lhs_stride;
  if (args.trans_lhs) {
    return FeedRows<kChunk, 1>(lhs + part.p * stride + part.i, stride, part.kc, kLhsStep,
                               nullptr, 0);
  }
  return FeedRows<kChunk, 1>(lhs + part.i * stride + part.p, stride, part.rows, part.kc,
                             IsFed<T>(false, part.kc) ? packed : nullptr,
                             part.rows * kChunk);
}

template <typename T>
void CompleteLhs(const GemmArgs& args, const LhsRows& part, RowFeed<kChunk, 1>& feed,
                 float* packed) {
  if (!IsFed<T>(args.trans_lhs, part.kc) || feed.untouched()) {
    return PackLhsBlock<T>(args, part.i, part.p, part.rows, part.kc, packed);
  }
  feed.Drain();
  const int64_t whole = part.kc / kChunkDepth * kChunkDepth;
  if (whole == part.kc) return;
  PackLhsBlock<T>(args, part.i, part.p + whole, part.rows, part.kc - whole,
                  packed + WordsIn(whole) * part.rows);
}

template <typename T>
TRACEA_INLINE RowFeed<kTileN, kWordDepth> FeedRhs(const GemmArgs& args,
                                                  const Block& block, float* packed) {
  if (!IsFed<T>(args.trans_rhs, block.kc)) return {};
  const T* from = (const T*)args.rhs + block.p0 * args.rhs_stride + block.j0;
  return FeedRows<kTileN, kWordDepth>(from, args.rhs_stride, block.kc, block.cols, packed,
                                      WordsIn(block.kc) * kTileN);
}

template <typename T>
void CompleteRhs(const GemmArgs& args, const Block& block,
                 RowFeed<kTileN, kWordDepth>& feed, float* packed) {
  if (block.kc == 0) return;
  if (!IsFed<T>(args.trans_rhs, block.kc) || feed.untouched()) {
    return PackRhsBlock<T>(args, block.p0, block.j0, block.kc, block.cols, packed);
  }
  feed.Drain();
  const int64_t whole = block.cols / kTileN * kTileN;
  if (whole == block.cols) return;
  PackRhsBlock<T>(args, block.p0, block.j0 + whole, block.kc, block.cols - whole,
                  packed + whole * WordsIn(block.kc));
}

TRACEA_INLINE void PrefetchSums(const Partial& partial, int64_t i, int64_t j,
                                int64_t rows) {
  const float* row = partial.data + i * partial.stride + j;
  for (int64_t r = 0; r < rows; ++r, row += partial.stride) {
    PrefetchBytes(row, kTileN * (int64_t)sizeof(float));
  }
}

// Rows of the first of the row blocks, as equal as possible, that [i0, i1) is cut into.
TRACEA_INLINE int64_t FirstRows(int64_t i0, int64_t i1) {
  return i0 < i1 ? CeilDiv(i1 - i0, CeilDiv(i1 - i0, kTileM)) : 0;
}

// Whether sums wait between K blocks in the workspace: those of f32 wait in the output.
bool BuffersSums(const GemmArgs& args, const GemmBlocks& blocks) {
  return args.out_type != DType::kF32 && blocks.kc < args.k;
}

// Packed operands: of each one block in use and one on its way.
struct GemmBuffers {
  float* rhs[2];
  float* lhs[2];
  float* bias;  // of a column strip
  float* sums;  // partial sums; null unless BuffersSums
  int turn;     // of lhs: the one on its way

  GemmBuffers(const GemmArgs& args, const GemmBlocks& blocks, Workspace& space) : turn(0) {
    const int64_t words = WordsIn(blocks.kc);
    for (float*& block : rhs) block = space.Take<float>(words * blocks.nc);
    for (float*& rows : lhs) rows = space.Take<float>(kLhsStep * (words + kChunk));
    bias = space.Take<float>(blocks.nc);
    const bool has_sums = BuffersSums(args, blocks);
    sums = has_sums ? space.Take<float>(blocks.mc * blocks.nc) : nullptr;
  }
};

int64_t GeneralBytes(const GemmArgs& args, const GemmBlocks& blocks) {
  return BytesOf<GemmBuffers>(args, blocks);
}

// `feeds` is at work on the first rows of lhs and leaves at work on those of `next`, if it
// is not null, whose rhs it has been copying too.
template <typename T>
void RunBlock(const GemmArgs& args, const Block& block, const Block* next,
              const Partial& partial, const float* rhs, const float* bias,
              GemmBuffers& buffers, Feeds& feeds) {
  const int64_t panels = CeilDiv(block.cols, kTileN);
  const int64_t chunks = block.kc > 0 ? CeilDiv(block.kc, kChunkDepth) : 1;
  const int64_t row_blocks = CeilDiv(block.i1 - block.i0, kTileM);
  const int64_t words = WordsIn(block.kc);
  feeds.rhs.Spread(panels * row_blocks * chunks);
  LhsRows part{block.i0, FirstRows(block.i0, block.i1), block.p0, block.kc};
  while (part.i < block.i1) {
    const float* lhs = buffers.lhs[buffers.turn];
    CompleteLhs<T>(args, part, feeds.lhs, buffers.lhs[buffers.turn]);
    buffers.turn ^= 1;
    const int64_t i = part.i, rows = part.rows;
    part.i += rows;
    part.rows = FirstRows(part.i, block.i1);
    LhsRows coming = part;
    if (part.i == block.i1 && next) {
      coming = {next->i0, FirstRows(next->i0, next->i1), next->p0, next->kc};
    }
    feeds.lhs = FeedLhs<T>(args, coming, buffers.lhs[buffers.turn]);
    feeds.lhs.Spread(panels * chunks);
    for (int64_t c = 0; c < block.cols; c += kTileN) {
      if (partial.data && c + kTileN < block.cols) {
        PrefetchSums(partial, i, block.j0 + c + kTileN, rows);
      }
      RunTile(args, block, partial, i, rows, c, lhs, rhs + c * words, bias, &feeds);
    }
  }
}

template <typename T>
void RunGeneral(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
                float* workspace) {
  Workspace space(workspace);
  GemmBuffers buffers(args, blocks, space);
  const bool in_place = args.out_type == DType::kF32;
  const int64_t mc = buffers.sums ? blocks.mc : range.m1 - range.m0;
  const int64_t nc = EqualWidth(range, blocks.nc, kTileN);
  const BlockLoop loop{range, args.k, blocks.kc, nc, mc};
  Block block = loop.First(), next;
  Feeds feeds;
  feeds.rhs = FeedRhs<T>(args, block, buffers.rhs[0]);
  const LhsRows first{block.i0, FirstRows(block.i0, block.i1), 0, block.kc};
  feeds.lhs = FeedLhs<T>(args, first, buffers.lhs[0]);
  const float* bias = nullptr;
  int turn = 0;
  for (bool more = true; more; block = next, turn ^= 1) {
    CompleteRhs<T>(args, block, feeds.rhs, buffers.rhs[turn]);
    if (block.first) bias = LoadBias(args, block.j0, block.cols, buffers.bias);
    more = loop.Next(block, &next);
    feeds.rhs = {};
    if (more) feeds.rhs = FeedRhs<T>(args, next, buffers.rhs[turn ^ 1]);
    Partial partial{nullptr, 0, true};
    if (in_place) partial = {(float*)args.out, args.out_stride, false};
    if (buffers.sums) partial = {buffers.sums - block.i0 * nc - block.j0, nc, true};
    RunBlock<T>(args, block, more ? &next : nullptr, partial, buffers.rhs[turn], bias,
                buffers, feeds);
  }
}
