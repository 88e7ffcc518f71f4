// gemm_sm80: C[b] = epilogue(op(A[b]) @ op(B[b])) on every GPU since sm_80, f32 inside.
//
// One block computes one tile of the output: it is multiplied by tile/mma_tile.cuh, from
// operands that tile/async_copy.cuh brings, and each warp stores its own part straight from
// the registers.
//
// Operands are bf16 or f16, or f32 rounded to TF32. Rows of A, B and C may have any length:
// kAlignA and kAlignB are the bytes that the rows of A and B are even multiples of, 2 to
// 16, and zeros stand for what is outside. One kernel serves every size of its alignment.
//
// Assumes k >= 1, operands aligned to 16 bytes as a whole, and fewer than 2^31 tiles.
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "tile/async_copy.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"
#include "tile/mma_tile.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct GemmSm80Params {
  const void* a;
  const void* b;
  FragmentEpilogueParams epilogue;
  int m, n, k;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

// Copies of an operand's tiles of kExtent rows or columns beside k, along which a matrix has
// `extent` of them. kMnMajor: rows of the matrix run along m or n, else along k.
template <class Traits, class Swizzle, int kExtent, bool kMnMajor, int kAlignBytes>
struct GemmSm80Operand {
  using Element = typename Traits::Element;
  using Shape = MmaTileShape<Traits>;
  using Copy = TileCopy<Element, Swizzle, kMnMajor ? Traits::kTileK : kExtent,
                        kMnMajor ? kExtent : Traits::kTileK, !kMnMajor, kAlignBytes,
                        Shape::kThreads, Shape::kParts>;

  // Of the matrix of a batch, from its row or column `first` on.
  TRACEA_DEVICE static Copy copy(const void* operand, i64 batch, int extent, int k,
                                 int first) {
    const Element* matrix = static_cast<const Element*>(operand) + batch * extent * k;
    return Copy(matrix, kMnMajor ? k : extent, kMnMajor ? extent : k, kMnMajor ? 0 : first,
                kMnMajor ? first : 0);
  }
};

template <class Traits>
TRACEA_DEVICE void gemm_sm80(const GemmSm80Params& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  using Shape = MmaTileShape<Traits>;
  using OperandA = GemmSm80Operand<Traits, typename Traits::SwizzleA, Traits::kTileM,
                                   Traits::kMnMajorA, Traits::kAlignA>;
  using OperandB = GemmSm80Operand<Traits, typename Traits::SwizzleB, Traits::kTileN,
                                   Traits::kMnMajorB, Traits::kAlignB>;
  using Tile = MmaTile<Traits, typename OperandA::Copy, typename OperandB::Copy>;
  using Epilogue = FragmentEpilogue<Traits, Shape::kBlocksM, 2 * Shape::kBlocksN>;

  const BandedRaster<Traits::kRasterBand> raster{ceil_div(p.m, Traits::kTileM),
                                                 ceil_div(p.n, Traits::kTileN)};
  const TileCoordinate at = raster.at(blockIdx.x);
  const int m = at.m * Traits::kTileM, n = at.n * Traits::kTileN;

  auto copy_a = OperandA::copy(p.a, p.a_batched ? at.batch : 0, p.m, p.k, m);
  auto copy_b = OperandB::copy(p.b, p.b_batched ? at.batch : 0, p.n, p.k, n);
  Tile tile(smem_bytes, copy_a, copy_b);
  typename Tile::Accumulators sums = {};
  tile.add(sums, ceil_div(p.k, Traits::kTileK));

  Epilogue(p.epilogue, m + Shape::first_row(), n + Shape::first_column(), at.batch)
      .store(sums);
}

}  // namespace tracea
