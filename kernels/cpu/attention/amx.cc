// Attention in bf16 for AMX, on processors with AVX-512 BF16 as well.

#include "attention/attention.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/amx_impl.h"
#include "attention/amx_impl.h"
#include "attention/gradient_amx_impl.h"
}  // namespace

extern const AttentionIsa kAmxAttention;
const AttentionIsa kAmxAttention = {"amx", kAmxRows, kAmxCols, RunAttention,
                                     kTilesAtOnce};

extern const AttentionGradientIsa kAmxAttentionGradient;
const AttentionGradientIsa kAmxAttentionGradient = {
    "amx", kAmxRows, kAmxCols, RunGradientOfQueries, RunGradientOfKeys, nullptr};

}  // namespace tracea::cpu
