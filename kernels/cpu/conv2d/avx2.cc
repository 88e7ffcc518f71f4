// Convolutions for AVX2 with FMA and F16C.

#include "conv2d/conv2d.h"

#include <string.h>

#include <immintrin.h>

#define TRACEA_LANES 8
#define TRACEA_TILE_M 6  // 12 accumulators, 2 of rhs and 1 of lhs: 15 of 16 registers

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "conv2d/widened_impl.h"
}  // namespace

extern const ConvIsa kAvx2Conv;
const ConvIsa kAvx2Conv = {
    Isa::kAvx2, kTileM, kTileN, sizeof(float), kMostSums, {RunConv, ConvBytes},
    {RunWeightGrad, WeightGradBytes}, {RunDepthwise, DepthwiseBytes},
    {RunDepthwiseWeightGrad, DepthwiseWeightGradBytes}};

}  // namespace tracea::cpu
