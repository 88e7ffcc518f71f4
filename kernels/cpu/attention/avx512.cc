// Attention for AVX-512 F, BW, DQ and VL.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/vectors_impl.h"
#include "attention/gradient_vectors_impl.h"
}  // namespace

extern const AttentionIsa kAvx512Attention;
const AttentionIsa kAvx512Attention = {
    Isa::kAvx512, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kAvx512AttentionGradient;
const AttentionGradientIsa kAvx512AttentionGradient = {
    Isa::kAvx512, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
