// The matrix product for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "gemm/gemm.h"

#include <string.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 4
#if defined(__aarch64__)
#define TRACEA_TILE kBaselineGemmTile
#else
#define TRACEA_TILE kBaselineTile
#endif

namespace tracea::cpu {

#if defined(__aarch64__)
extern const MicroKernels<10, 2> kBaselineGemmTile;
#endif

namespace {
#include "common/vec_impl.h"
#include "gemm/widened_impl.h"
}  // namespace

#if defined(__aarch64__)
// 20 accumulators of 32 registers: compilers spill 24.
constexpr TileKernels kBaselineGemmTile = AllMicroKernels();
#endif

extern const GemmIsa kBaselineGemm;
const GemmIsa kBaselineGemm = {
    Isa::kBaseline, kTileM, kTileN, kDepthUnit, sizeof(float), RunGemm, GemmBytes,
    1, false, false, kStreamDepth, kPair};

}  // namespace tracea::cpu
