// CPU matrix product with a fused epilogue, without any XLA type:
//
//   z = op(lhs) @ op(rhs) + bias;   out = activation(z) + residual
//                               or  out = activation(z) * residual
//
// Sums are kept in f32 and rounded once, at the store. Blocks of k are summed one by one,
// ascending (dot products by lanes, where that is how a streamed operand is stored). The
// bits of a result depend on shape, layout, instruction set and the depth of these blocks,
// but neither on the other blocking nor on the split into tasks nor on the number of
// threads.
//
// On AVX-512 BF16, AMX and BFMMLA subnormal bf16 operands and sums count as zero,
// elsewhere not.
// BFMMLA does not round sums to nearest: see gemm/bfmmla_impl.h.
//
// A kernel exists once per instruction set (`GemmIsa`). It computes one range of one
// product on the calling thread and neither allocates nor throws; `PlanGemm` says how
// to cut a product into ranges and how much workspace each needs.

#ifndef TRACEA_KERNELS_CPU_GEMM_GEMM_H_
#define TRACEA_KERNELS_CPU_GEMM_GEMM_H_

#include <cstdint>

#include "common/isa.h"
#include "common/memory.h"
#include "common/types.h"

namespace tracea::cpu {

enum class ResidualOp : int32_t { kAdd, kMultiply };

// One matrix product. Strides are distances between rows as stored, in elements.
struct GemmArgs {
  const void* lhs;       // (m, k), or (k, m) if trans_lhs
  const void* rhs;       // (k, n), or (n, k) if trans_rhs
  void* out;             // (m, n)
  const void* bias;      // (n,) or null
  const void* residual;  // (m, n) or null
  void* preactivation;   // (m, n) of out_type: receives z; or null
  int64_t m, n, k;
  int64_t lhs_stride, rhs_stride, out_stride, residual_stride;
  DType in_type;  // of lhs and of rhs
  DType out_type, bias_type, residual_type;
  bool trans_lhs, trans_rhs;
  Activation activation;
  ResidualOp residual_op;  // how the residual joins, if there is one
};

// The free choices; 0 means the default. Only kc changes the result, by its rounding.
struct GemmConfig {
  int64_t kc;     // depth of a packed block of rhs
  int64_t nc;     // its width
  int64_t tasks;  // ranges per thread
};

// Rows of a streamed rhs that pass at once where more would leave L1 too little.
inline constexpr int kShallowDepth = 4;

// Whether the output has so few rows, or columns, that the operand which does not have them
// is streamed once, unpacked.
enum class Skinny : int32_t { kNo, kRows, kColumns };

// Blocking as the kernel uses it; made by `PlanGemm`.
struct GemmBlocks {
  int64_t kc, nc, mc;
  int64_t rhs_depth;     // of the packed rhs in memory: kc, or k to use it for all row strips
  bool packs_lhs;        // of matrices: all of it, not only what cannot be loaded as stored
  Skinny skinny;
  // If it is, of the few rows, be they those of the transposed product:
  int64_t strip;         // columns whose sums are kept while rhs passes,
  int64_t sums_stride;   // from one row of these sums to the next,
  int64_t stream_depth;  // rows of rhs that pass at once
};

struct GemmIsa {
  Isa isa;
  int64_t tile_m, tile_n;  // register tile, in elements
  int64_t depth_unit;      // of k: packed blocks have a multiple of it
  int64_t packed_bytes;    // of a packed element: 2 as bf16, else 4
  void (*run)(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
              float* workspace);
  // That `run` lays out, for any range.
  int64_t (*workspace_bytes)(const GemmArgs& args, const GemmBlocks& blocks);
  double speedup = 1;        // of its multiply-adds over those of vectors, roughly
  bool loads_rows = false;   // whole steps of whole rows of lhs need no packing
  bool pairs = false;        // vectors of pairs of bf16: of f32 otherwise
  int64_t stream_depth = 0;  // rows of a streamed rhs that its registers hold at once,
  int64_t stream_cols = 0;   // and columns
};

// How a batch of equal products is cut into tasks.
struct GemmPlan {
  GemmBlocks blocks;
  int64_t batch, batch_step;
  int64_t m, m_step;
  int64_t n, n_step;
  int64_t workspace_bytes;  // for one running task, 64-byte aligned; below 42 MB

  int64_t num_m() const { return m == 0 ? 0 : (m - 1) / m_step + 1; }
  int64_t num_n() const { return n == 0 ? 0 : (n - 1) / n_step + 1; }
  int64_t num_batch() const { return batch == 0 ? 0 : (batch - 1) / batch_step + 1; }
  int64_t num_tasks() const { return num_batch() * num_m() * num_n(); }

  // Of task `task`, in each of its products.
  MatrixRange Range(int64_t task) const {
    const int64_t m0 = task % num_m() * m_step, n0 = task / num_m() % num_n() * n_step;
    return {m0, m - m0 < m_step ? m : m0 + m_step, n0, n - n0 < n_step ? n : n0 + n_step};
  }
};

GemmPlan PlanGemm(const GemmIsa& isa, const GemmArgs& args, int64_t batch,
                  const GemmConfig& config, int64_t threads);

// The kernels for this product of the best instruction set, `wanted` at most, that build
// and machine have.
const GemmIsa* UsableGemmIsa(Isa wanted, const GemmArgs& args);

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_GEMM_GEMM_H_
