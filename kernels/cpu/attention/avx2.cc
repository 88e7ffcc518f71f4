// Attention for AVX2 with FMA and F16C.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 8
#define TRACEA_TILE_M 6  // 12 accumulators, 2 of rhs and 1 of lhs: 15 of 16 registers

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/widened_impl.h"
}  // namespace

extern const AttentionIsa kAvx2Attention;
const AttentionIsa kAvx2Attention = {
    Isa::kAvx2, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kAvx2AttentionGradient;
const AttentionGradientIsa kAvx2AttentionGradient = {
    Isa::kAvx2, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
