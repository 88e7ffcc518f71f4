// Attention for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "attention/attention.h"

#include <string.h>

#define TRACEA_LANES 4
#if defined(__aarch64__)
#define TRACEA_TILE_M 8  // 16 accumulators: 8x12 would fit too, but compilers spill it
#else
#define TRACEA_TILE_M 6  // 12 accumulators of 16 registers
#endif

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/widened_impl.h"
}  // namespace

extern const AttentionIsa kBaselineAttention;
const AttentionIsa kBaselineAttention = {
    Isa::kBaseline, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kBaselineAttentionGradient;
const AttentionGradientIsa kBaselineAttentionGradient = {
    Isa::kBaseline, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
