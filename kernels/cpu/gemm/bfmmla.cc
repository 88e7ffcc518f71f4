// The matrix product of bf16 operands for BFMMLA, where there are enough rows.

#include "gemm/gemm.h"

#include <string.h>

#include <arm_neon.h>

#define TRACEA_LANES 4

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "gemm/bfmmla_impl.h"
}  // namespace

extern const GemmIsa kBfmmlaGemm;
const GemmIsa kBfmmlaGemm = {
    Isa::kBfmmla, kTileM, kTileN, kQuad, sizeof(BF16), RunBfmmlaGemm, BfmmlaBytes, 4};

}  // namespace tracea::cpu
