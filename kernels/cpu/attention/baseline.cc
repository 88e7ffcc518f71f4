// Attention for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "attention/attention.h"

#include <string.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 4
#define TRACEA_TILE kBaselineTile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "attention/vectors_impl.h"
#include "attention/gradient_vectors_impl.h"
}  // namespace

extern const AttentionIsa kBaselineAttention;
const AttentionIsa kBaselineAttention = {
    Isa::kBaseline, kTileM, kTileN, {RunAttention, ForwardBytes}};

extern const AttentionGradientIsa kBaselineAttentionGradient;
const AttentionGradientIsa kBaselineAttentionGradient = {
    Isa::kBaseline, kTileM, kTileN, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {RunGradientOfHead, HeadBytes}};

}  // namespace tracea::cpu
