// The matrix product for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "gemm/gemm.h"

#include <string.h>

#define TRACEA_LANES 4
#if defined(__aarch64__)
#define TRACEA_TILE_M 10  // 20 accumulators of 32 registers: compilers spill 24
#else
#define TRACEA_TILE_M 6  // 12 accumulators of 16 registers
#endif

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "gemm/widened_impl.h"
}  // namespace

extern const GemmIsa kBaselineGemm;
const GemmIsa kBaselineGemm = {
    Isa::kBaseline, kTileM, kTileN, kDepthUnit, sizeof(float), RunGemm, GemmBytes,
    1, false, false, kStreamDepth, kPair};

}  // namespace tracea::cpu
