// The matrix product for AVX-512 F, BW, DQ and VL.

#include "gemm/gemm.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
// 27 accumulators, 3 of rhs and 1 of lhs: 31 of 32 registers. Two vectors by 14 rows are as
// fast on a core alone, but need more instructions, of which another thread on it lets
// fewer pass.
#define TRACEA_TILE kAvx512GemmTile

namespace tracea::cpu {

extern const MicroKernels<9, 3> kAvx512GemmTile;

namespace {
#include "common/vec_impl.h"
#include "gemm/widened_impl.h"
}  // namespace

constexpr TileKernels kAvx512GemmTile = AllMicroKernels();

extern const GemmIsa kAvx512Gemm;
const GemmIsa kAvx512Gemm = {
    Isa::kAvx512, kTileM, kTileN, kDepthUnit, sizeof(float), RunGemm, GemmBytes,
    1, false, false, kStreamDepth, kPair};

}  // namespace tracea::cpu
