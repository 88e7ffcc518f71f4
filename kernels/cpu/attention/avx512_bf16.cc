// Attention and its gradient in bf16 for AVX-512 BF16.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Bf16Tile
#define TRACEA_WORDS_OF_BF16
#define TRACEA_ONLY_BF16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/vectors_impl.h"
#include "attention/gradient_vectors_impl.h"
}  // namespace

extern const AttentionIsa kAvx512Bf16Attention;
const AttentionIsa kAvx512Bf16Attention = {
    Isa::kAvx512Bf16, kTileM, kTileN, {RunAttention, ForwardBytes}, true};

extern const AttentionGradientIsa kAvx512Bf16AttentionGradient;
const AttentionGradientIsa kAvx512Bf16AttentionGradient = {
    Isa::kAvx512Bf16, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}, true};

}  // namespace tracea::cpu
