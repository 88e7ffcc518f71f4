// Attention in bf16 for AMX, on processors with AVX-512 BF16 as well.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 16
#define TRACEA_ONLY_BF16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/amx_impl.h"
#include "attention/amx_impl.h"
#include "attention/gradient_amx_impl.h"
}  // namespace

extern const AttentionIsa kAmxAttention;
const AttentionIsa kAmxAttention = {
    Isa::kAmx, kAmxRows, kAmxCols, {RunAttention, ForwardBytes}, true};

extern const AttentionGradientIsa kAmxAttentionGradient;
const AttentionGradientIsa kAmxAttentionGradient = {
    Isa::kAmx, kAmxRows, kAmxCols, {RunGradientOfQueries, GradientBytes},
    {RunGradientOfKeys, GradientBytes}, {}, true};

}  // namespace tracea::cpu
