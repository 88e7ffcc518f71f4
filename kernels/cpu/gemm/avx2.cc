// The matrix product for AVX2 with FMA and F16C.

#include "gemm/gemm.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 8
#define TRACEA_TILE kAvx2Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "gemm/widened_impl.h"
}  // namespace

extern const GemmIsa kAvx2Gemm;
const GemmIsa kAvx2Gemm = {
    Isa::kAvx2, kTileM, kTileN, kDepthUnit, sizeof(float), RunGemm, GemmBytes,
    1, false, false, kStreamDepth, kPair};

}  // namespace tracea::cpu
