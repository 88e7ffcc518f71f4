// The matrix product for one instruction set: packing, micro-kernels, epilogue, loops.
//
//   for column strip j   (nc wide)
//     for row strip i    (mc rows: only if partial sums need a buffer of their own)
//       for K block p    (kc deep)
//         pack rhs[p, j]                 -> panels [nc / kTileN][kc][kTileN], in L2
//         for row block                  (up to kTileM rows)
//           pack lhs[row block, p]       -> chunks [kc / kChunk][rows][kChunk], in L1
//           for panel: micro-kernel, and after the last K block the epilogue
//
// Packing converts to f32 and transposes where the operand is stored transposed, so one
// micro-kernel serves every dtype and layout. Row blocks are as equal as possible and
// there is a micro-kernel for every row count, so ragged rows cost no wasted work; a
// ragged last panel is padded with zeros.
//
// Included by gemm_<isa>.cc inside an unnamed namespace, after vec_impl.h and under the
// same rules, and so are the parts that it includes. The includer defines TRACEA_TILE_M.

#include "activation_impl.h"
#include "gemm_tile_impl.h"
#include "gemm_pack_impl.h"
#include "gemm_epilogue_impl.h"
#include "gemm_skinny_impl.h"

template <typename T>
void PackLhsBlock(const GemmArgs& args, int64_t i, int64_t p, int64_t rows, int64_t kc,
                  float* packed) {
  const T* lhs = (const T*)args.lhs;
  if (args.trans_lhs) {
    PackLhsTransposed(lhs + p * args.lhs_stride + i, args.lhs_stride, rows, args.m - i,
                      kc, packed);
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

// One K block of one row strip: rows [i0, i1), columns [j0, j0 + cols).
struct Block {
  int64_t i0, i1, j0, cols, p0, kc;
  bool first, last;  // of the K blocks
};

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

// The register tile at (i, j0 + c): product, then partial store or epilogue.
TRACEA_INLINE void RunTile(const GemmArgs& args, const Block& block,
                           const Partial& partial, int64_t i, int64_t rows, int64_t c,
                           const float* lhs, const float* rhs, const float* bias) {
  alignas(64) float buffer[kTileM * kTileN];
  const int64_t cols = Min(kTileN, block.cols - c);
  const int64_t j = block.j0 + c;
  const bool whole = cols == kTileN || partial.padded;
  float* sums = partial.data ? partial.data + i * partial.stride + j : nullptr;
  const MicroKernelFn micro = kMicroKernels.table[cols > kLanes][rows - 1];

  const float* src = block.first ? nullptr : sums;
  int64_t src_stride = partial.stride;
  if (src && !whole) {
    CopyColumns(sums, partial.stride, buffer, kTileN, rows, cols);
    src = buffer;
    src_stride = kTileN;
  }
  const bool direct = whole && (block.last ? cols == kTileN && IsPlain(args) : true);
  if (direct) {
    micro(block.kc, lhs, rhs, src, src_stride, sums, partial.stride);
    return;
  }
  micro(block.kc, lhs, rhs, src, src_stride, buffer, kTileN);
  if (block.last) {
    Finish(args, Tile{buffer, kTileN, i, j, rows, cols}, bias ? bias + c : nullptr);
  } else {
    CopyColumns(buffer, kTileN, sums, partial.stride, rows, cols);
  }
}

// Brings the part of lhs that the next row block packs closer while this one computes: a
// share of its rows (as stored) per panel, because a burst would stall the loads of the
// micro-kernel.
template <typename T>
struct LhsPrefetch {
  const T* row;
  int64_t stride, rows, bytes, share;

  TRACEA_INLINE LhsPrefetch(const GemmArgs& args, const Block& block, int64_t i,
                            int64_t panels) {
    const int64_t count = Min(kTileM, block.i1 - i);
    stride = args.lhs_stride;
    if (args.trans_lhs) {
      row = (const T*)args.lhs + block.p0 * stride + i;
      rows = count > 0 ? block.kc : 0;
      bytes = count * (int64_t)sizeof(T);
    } else {
      row = (const T*)args.lhs + i * stride + block.p0;
      rows = count;
      bytes = block.kc * (int64_t)sizeof(T);
    }
    share = CeilDiv(rows, panels);
  }

  TRACEA_INLINE void Step() {
    const int64_t count = Min(share, rows);
    for (int64_t r = 0; r < count; ++r, row += stride) PrefetchBytes(row, bytes);
    rows -= count;
  }
};

TRACEA_INLINE void PrefetchSums(const Partial& partial, int64_t i, int64_t j,
                                int64_t rows) {
  const float* row = partial.data + i * partial.stride + j;
  for (int64_t r = 0; r < rows; ++r, row += partial.stride) {
    PrefetchBytes(row, kTileN * (int64_t)sizeof(float));
  }
}

template <typename T>
void RunBlock(const GemmArgs& args, const Block& block, const Partial& partial,
              const float* rhs, const float* bias, float* lhs) {
  const int64_t panels = CeilDiv(block.cols, kTileN);
  int64_t row_blocks = CeilDiv(block.i1 - block.i0, kTileM);
  for (int64_t i = block.i0; i < block.i1; --row_blocks) {
    const int64_t rows = CeilDiv(block.i1 - i, row_blocks);
    PackLhsBlock<T>(args, i, block.p0, rows, block.kc, lhs);
    LhsPrefetch<T> prefetch(args, block, i + rows, panels);
    for (int64_t c = 0; c < block.cols; c += kTileN) {
      prefetch.Step();
      if (partial.data && c + kTileN < block.cols) {
        PrefetchSums(partial, i, block.j0 + c + kTileN, rows);
      }
      RunTile(args, block, partial, i, rows, c, lhs, rhs + c * block.kc, bias);
    }
    i += rows;
  }
}

template <typename T>
void RunGeneral(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
                float* workspace) {
  float* rhs = workspace;
  float* lhs = rhs + blocks.kc * blocks.nc;
  float* bias_buffer = lhs + kTileM * (blocks.kc + kChunk);
  float* sums = bias_buffer + blocks.nc;

  const bool in_place = args.out_type == DType::kF32;
  const bool buffered = !in_place && blocks.kc < args.k;
  const int64_t mc = buffered ? blocks.mc : range.m1 - range.m0;
  // Strips of equal width: a narrow last one would use each packed lhs too little.
  const int64_t width = range.n1 - range.n0;
  const int64_t nc =
      CeilDiv(CeilDiv(width, CeilDiv(width, blocks.nc)), kTileN) * kTileN;
  for (int64_t j = range.n0; j < range.n1; j += nc) {
    const int64_t cols = Min(nc, range.n1 - j);
    const float* bias = LoadBias(args, j, cols, bias_buffer);
    for (int64_t i = range.m0; i < range.m1; i += mc) {
      const int64_t i1 = Min(i + mc, range.m1);
      Partial partial{nullptr, 0, true};
      if (in_place) partial = {(float*)args.out, args.out_stride, false};
      if (buffered) partial = {sums - i * nc - j, nc, true};
      int64_t p = 0;
      do {  // once if k == 0: the epilogue of zero
        const int64_t kc = Min(blocks.kc, args.k - p);
        if (kc > 0) PackRhsBlock<T>(args, p, j, kc, cols, rhs);
        const Block block{i, i1, j, cols, p, kc, p == 0, p + kc == args.k};
        RunBlock<T>(args, block, partial, rhs, bias, lhs);
        p += kc;
      } while (p < args.k);
    }
  }
}

// ---- Entry ----------------------------------------------------------------------------

template <typename T>
void Run(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
         float* workspace) {
  if (!blocks.skinny) return RunGeneral<T>(args, blocks, range, workspace);
  switch (args.m) {
    case 1:
      return RunSkinny<T, 1>(args, range, workspace);
    case 2:
      return RunSkinny<T, 2>(args, range, workspace);
    case 4:
      return RunSkinny<T, 4>(args, range, workspace);
    default:
      return RunSkinny<T, 0>(args, range, workspace);
  }
}

void RunGemm(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
             float* workspace) {
  switch (args.in_type) {
    case DType::kF32:
      return Run<F32>(args, blocks, range, workspace);
    case DType::kBF16:
      return Run<BF16>(args, blocks, range, workspace);
    case DType::kF16:
      return Run<F16>(args, blocks, range, workspace);
  }
}
