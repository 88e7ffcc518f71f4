// Attention for AVX2 with FMA and F16C.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 8
#define TRACEA_TILE kAvx2Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/vectors_impl.h"
#include "attention/gradient_vectors_impl.h"
}  // namespace

extern const AttentionIsa kAvx2Attention;
const AttentionIsa kAvx2Attention = {
    Isa::kAvx2, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kAvx2AttentionGradient;
const AttentionGradientIsa kAvx2AttentionGradient = {
    Isa::kAvx2, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
