// The matrix product of bf16 operands for AMX, where there are enough rows.

#include "gemm/gemm.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/amx_impl.h"
#include "gemm/amx_impl.h"
}  // namespace

extern const GemmIsa kAmxGemm;
const GemmIsa kAmxGemm = {
    Isa::kAmx, kAmxRows, kAmxCols, kAmxDepth, sizeof(BF16), RunAmxGemm, AmxBytes, 8, true};

}  // namespace tracea::cpu
