// Convolutions for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "conv2d/conv2d.h"

#include <string.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 4
#define TRACEA_TILE kBaselineTile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "conv2d/widened_impl.h"
}  // namespace

extern const ConvIsa kBaselineConv;
const ConvIsa kBaselineConv = {
    Isa::kBaseline, kTileM, kTileN, sizeof(float), kMostSums, {RunConv, ConvBytes},
    {RunWeightGrad, WeightGradBytes}, {RunDepthwise, DepthwiseBytes},
    {RunDepthwiseWeightGrad, DepthwiseWeightGradBytes}};

}  // namespace tracea::cpu
