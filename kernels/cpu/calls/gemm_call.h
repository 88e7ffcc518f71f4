// Calls of the CPU matrix product; see gemm_call.cc for their contract.

#ifndef TRACEA_KERNELS_CPU_CALLS_GEMM_CALL_H_
#define TRACEA_KERNELS_CPU_CALLS_GEMM_CALL_H_

#include <string_view>

#include "calls/call.h"
#include "gemm/gemm.h"

namespace tracea {

struct GemmOptions {
  bool trans_lhs = false, trans_rhs = false;
  cpu::Activation activation = cpu::Activation::kNone;
  std::string_view bias = "none";  // "none", "row" or "batched_row"
  bool has_residual = false, save_preactivation = false;
  cpu::ResidualOp residual_op = cpu::ResidualOp::kAdd;
  cpu::Isa isa = cpu::kBestIsa;
  cpu::GemmConfig config{};
};

// The options live no longer than the attributes.
GemmOptions ParseGemm(const Attributes& attrs);

void RunGemm(Pool& pool, const GemmOptions& options, Arrays operands, Arrays results);

}  // namespace tracea

#endif  // TRACEA_KERNELS_CPU_CALLS_GEMM_CALL_H_
