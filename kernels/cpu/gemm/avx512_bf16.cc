// The matrix product of bf16 operands for AVX-512 BF16, where there are enough rows.

#include "gemm/gemm.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Bf16Tile
#define TRACEA_WORDS_OF_BF16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "gemm/vectors_impl.h"
}  // namespace

extern const GemmIsa kAvx512Bf16Gemm;
const GemmIsa kAvx512Bf16Gemm = {
    Isa::kAvx512Bf16, kTileM, kTileN, kDepthUnit, sizeof(BF16), RunGeneral<BF16>,
    GeneralBytes, 2, false, true};

}  // namespace tracea::cpu
