// Convolutions for AVX2 with FMA and F16C.

#include "conv2d/conv2d.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 8
#define TRACEA_TILE kAvx2Tile

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
