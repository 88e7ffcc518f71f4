// Convolutions of bf16 for AMX.

#include "conv2d/conv2d.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/amx_impl.h"
#include "conv2d/amx_impl.h"
#include "conv2d/weight_amx_impl.h"
}  // namespace

extern const ConvIsa kAmxConv;
const ConvIsa kAmxConv = {
    Isa::kAmx, kAmxRows, kAmxCols, sizeof(BF16), kMostSums, {RunAmxConv, AmxConvBytes},
    {RunAmxWeightGrad, AmxWeightGradBytes}, {}, {}};

}  // namespace tracea::cpu
