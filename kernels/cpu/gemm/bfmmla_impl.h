// The matrix product of bf16 operands with BFMMLA of 64-bit ARM (FEAT_BF16).
//
//   for column strip j     (nc wide)
//     for row strip i      (mc rows: as many as have their partial sums in L2)
//       for K block p      (kc deep)
//         pack rhs[p, j]   -> panels of 12 columns, in L2; once for all row strips
//         for row block    (8 rows)
//           pack lhs[row block, p]     in L1
//           for panel: tile product, and after the last K block the epilogue
//
// One BFMMLA takes 2 rows of lhs and 2 columns of rhs, a quad of the depth each, to 2 x 2
// sums in one register:
//
//   lhs [ row 0: k0 k1 k2 k3 | row 1: k0 k1 k2 k3 ]        sums [ 00 01 10 11 ]
//   rhs [ col 0: k0 k1 k2 k3 | col 1: k0 k1 k2 k3 ]
//
// So both operands are packed alike: quad by quad of the depth, in it by row of lhs or by
// column of rhs, padded with zeros to whole quads, blocks and panels.
//
// BFMMLA adds a quad as two pairs of products. It rounds every sum to odd, not to nearest,
// and takes subnormals for zero whatever the control register says, so its results differ
// from those of widened operands by roundings of f32. (Arm Architecture Reference Manual,
// BFMMLA and BFDotAdd; extended behaviour, FEAT_EBF16, is off in Linux.)
//
// Tested under emulation only: the block sizes follow from register and cache sizes, and
// nothing is known of the speed.
//
// Included by gemm/bfmmla.cc inside an unnamed namespace, after common/vec_impl.h.

#include "common/activation_impl.h"
#include "common/block_loop_impl.h"
#include "common/workspace_impl.h"
#include "gemm/epilogue_impl.h"

// 24 registers of sums, 4 of lhs and 3 of rhs at a time: 31 of 32.
constexpr int kTileM = 8;
constexpr int kTileN = 12;
constexpr int kQuad = 4;
constexpr int kTilePairs = kTileM / 2;
constexpr int kColPairs = kTileN / 2;
constexpr int64_t kTileSize = kTileM * kTileN;

// Buffers of one task.
struct Buffers {
  float* bias;  // of a column strip
  BF16* lhs;    // a row block of one K block
  BF16* rhs;    // K blocks of panels: all of them if there are several row strips
  float* sums;  // partial sums, tile by tile; null unless there are several K blocks

  Buffers(const GemmArgs& args, const GemmBlocks& blocks, Workspace& space) {
    bias = space.Take<float>(blocks.nc);
    lhs = space.Take<BF16>(kTileM * blocks.kc);
    rhs = space.Take<BF16>(blocks.rhs_depth * blocks.nc);
    const bool several = blocks.kc < args.k;
    sums = several ? space.Take<float>(blocks.mc * blocks.nc) : nullptr;
  }
};

int64_t BfmmlaBytes(const GemmArgs& args, const GemmBlocks& blocks) {
  return BytesOf<Buffers>(args, blocks);
}

// ---- Packing --------------------------------------------------------------------------

// The first `count` elements; the other ones are zero and their memory is not touched.
TRACEA_INLINE uint16x4_t LoadQuad(const BF16* p, int64_t count) {
  uint16x4_t quad = vdup_n_u16(0);
  if (count >= kQuad) {
    memcpy(&quad, p, sizeof(quad));
  } else if (count > 0) {
    memcpy(&quad, p, count * sizeof(BF16));
  }
  return quad;
}

// A panel of kWidth rows of lhs or columns of rhs, `width` of which exist. Element (x, p)
// is at from[x * stride + p].
template <int kWidth>
void PackAlong(const BF16* from, int64_t stride, int64_t width, int64_t depth, BF16* to) {
  for (int64_t p = 0; p < depth; p += kQuad) {
    TRACEA_UNROLL
    for (int x = 0; x < kWidth; ++x, to += kQuad) {
      vst1_u16(&to->bits, LoadQuad(from + x * stride + p, x < width ? depth - p : 0));
    }
  }
}

// The same with element (x, p) at from[p * stride + x].
template <int kWidth>
void PackAcross(const BF16* from, int64_t stride, int64_t width, int64_t depth,
                BF16* to) {
  for (int64_t p = 0; p < depth; p += kQuad, from += kQuad * stride) {
    TRACEA_UNROLL
    for (int x = 0; x < kWidth; x += kQuad, to += kQuad * kQuad) {
      uint16x4x4_t rows;
      TRACEA_UNROLL
      for (int q = 0; q < kQuad; ++q) {
        rows.val[q] = LoadQuad(from + q * stride + x, q < depth - p ? width - x : 0);
      }
      vst4_u16(&to->bits, rows);  // transposes
    }
  }
}

TRACEA_INLINE void PackLhsBlock(const GemmArgs& args, int64_t i, int64_t p, int64_t rows,
                                int64_t kc, BF16* to) {
  const BF16* lhs = (const BF16*)args.lhs;
  const int64_t stride = args.lhs_stride;
  if (args.trans_lhs) {
    PackAcross<kTileM>(lhs + p * stride + i, stride, rows, kc, to);
  } else {
    PackAlong<kTileM>(lhs + i * stride + p, stride, rows, kc, to);
  }
}

TRACEA_INLINE void PackRhsBlock(const GemmArgs& args, int64_t p, int64_t j, int64_t kc,
                                int64_t cols, BF16* to) {
  const BF16* rhs = (const BF16*)args.rhs;
  const int64_t stride = args.rhs_stride;
  const int64_t panel = CeilDiv(kc, kQuad) * kQuad * kTileN;
  for (int64_t c = 0; c < cols; c += kTileN, to += panel) {
    if (args.trans_rhs) {
      PackAlong<kTileN>(rhs + (j + c) * stride + p, stride, cols - c, kc, to);
    } else {
      PackAcross<kTileN>(rhs + p * stride + j + c, stride, cols - c, kc, to);
    }
  }
}

// ---- Tile product ---------------------------------------------------------------------

TRACEA_INLINE bfloat16x8_t LoadPair(const BF16* p) {
  return vreinterpretq_bf16_u16(vld1q_u16(&p->bits));
}

// Columns j to j + 3 of a row, of the sums of columns (j, j + 1) and (j + 2, j + 3).
TRACEA_INLINE float32x4_t UpperRow(float32x4_t a, float32x4_t b) {
  const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
  return vreinterpretq_f32_f64(vzip1q_f64(x, y));
}
TRACEA_INLINE float32x4_t LowerRow(float32x4_t a, float32x4_t b) {
  const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
  return vreinterpretq_f32_f64(vzip2q_f64(x, y));
}

// Compilers would load all of rhs first and spill sums instead.
TRACEA_INLINE void LoadNoneEarlier() { __asm__ volatile("" ::: "memory"); }

// dst = src + lhs @ rhs for kPairs pairs of rows of a packed row block and for a packed
// panel; a null src is zero. src has the order of registers, and dst unless `by_rows`.
// src joins at the end: rounding errors then grow with the depth of a block, not with k.
template <int kPairs>
void TileProduct(int64_t kc, const BF16* lhs, const BF16* rhs, const float* src,
                 float* dst, bool by_rows) {
  float32x4_t acc[kPairs][kColPairs];
  TRACEA_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kColPairs; ++j) acc[i][j] = vdupq_n_f32(0);
  }
  for (; kc > 0; kc -= kQuad, lhs += kTileM * kQuad, rhs += kTileN * kQuad) {
    bfloat16x8_t a[kPairs];
    TRACEA_UNROLL
    for (int i = 0; i < kPairs; ++i) a[i] = LoadPair(lhs + 2 * i * kQuad);
    TRACEA_UNROLL
    for (int j = 0; j < kColPairs; ++j) {
      if (j == kColPairs / 2) LoadNoneEarlier();
      const bfloat16x8_t b = LoadPair(rhs + 2 * j * kQuad);
      TRACEA_UNROLL
      for (int i = 0; i < kPairs; ++i) acc[i][j] = vbfmmlaq_f32(acc[i][j], a[i], b);
    }
  }
  TRACEA_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kColPairs; ++j) {
      const int64_t at = (i * kColPairs + j) * kLanes;
      if (src) acc[i][j] = vaddq_f32(acc[i][j], vld1q_f32(src + at));
      if (!by_rows) vst1q_f32(dst + at, acc[i][j]);
    }
    if (!by_rows) continue;
    TRACEA_UNROLL
    for (int j = 0; j < kColPairs; j += 2) {
      float* to = dst + 2 * i * kTileN + 2 * j;
      vst1q_f32(to, UpperRow(acc[i][j], acc[i][j + 1]));
      vst1q_f32(to + kTileN, LowerRow(acc[i][j], acc[i][j + 1]));
    }
  }
}

using TileProductFn = void (*)(int64_t, const BF16*, const BF16*, const float*, float*,
                               bool);
constexpr TileProductFn kTileProducts[kTilePairs] = {TileProduct<1>, TileProduct<2>,
                                                     TileProduct<3>, TileProduct<4>};

// ---- Loops ----------------------------------------------------------------------------

void RunBlock(const GemmArgs& args, const Block& block, const Buffers& buffers,
              const BF16* rhs, const float* bias) {
  const int64_t panel = CeilDiv(block.kc, kQuad) * kQuad * kTileN;
  float* sums = buffers.sums;
  for (int64_t i = block.i0; i < block.i1; i += kTileM) {
    const int64_t rows = Min(kTileM, block.i1 - i);
    const TileProductFn product = kTileProducts[(rows - 1) / 2];
    PackLhsBlock(args, i, block.p0, rows, block.kc, buffers.lhs);
    const BF16* b = rhs;
    for (int64_t c = 0; c < block.cols; c += kTileN, b += panel, sums += kTileSize) {
      alignas(64) float tile[kTileSize];
      const float* src = block.first ? nullptr : sums;
      product(block.kc, buffers.lhs, b, src, block.last ? tile : sums, block.last);
      if (!block.last) continue;
      const int64_t cols = Min(kTileN, block.cols - c);
      Finish(args, Tile{tile, kTileN, i, block.j0 + c, rows, cols},
             bias ? bias + c : nullptr);
    }
  }
}

void RunBfmmlaGemm(const GemmArgs& args, const GemmBlocks& blocks,
                   const MatrixRange& range, float* workspace) {
  Workspace space(workspace);
  const Buffers buffers(args, blocks, space);
  const int64_t nc = EqualWidth(range, blocks.nc, kTileN);
  const bool kept = blocks.rhs_depth > blocks.kc || blocks.kc >= args.k;
  const float* bias = nullptr;
  const BlockLoop loop{range, args.k, blocks.kc, nc, blocks.mc};
  loop.ForEach([&](const Block& block) {
    if (loop.BeginsStrip(block)) {
      bias = LoadBias(args, block.j0, block.cols, buffers.bias);
    }
    BF16* rhs = buffers.rhs + (kept ? block.p0 * nc : 0);
    if (block.i0 == range.m0 || !kept) {
      PackRhsBlock(args, block.p0, block.j0, block.kc, block.cols, rhs);
    }
    RunBlock(args, block, buffers, rhs, bias);
  });
}
