// Attention for AVX-512 F, BW, DQ and VL.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 16
#define TRACEA_TILE_M 14  // 28 accumulators, 2 of rhs and 1 of lhs: 31 of 32 registers

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/widened_impl.h"
}  // namespace

extern const AttentionIsa kAvx512Attention;
const AttentionIsa kAvx512Attention = {
    Isa::kAvx512, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kAvx512AttentionGradient;
const AttentionGradientIsa kAvx512AttentionGradient = {
    Isa::kAvx512, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
