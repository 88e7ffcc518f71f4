// Convolutions for AVX-512 F, BW, DQ and VL.

#include "conv2d/conv2d.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "conv2d/widened_impl.h"
}  // namespace

extern const ConvIsa kAvx512Conv;
const ConvIsa kAvx512Conv = {
    Isa::kAvx512, kTileM, kTileN, sizeof(float), kMostSums, {RunConv, ConvBytes},
    {RunWeightGrad, WeightGradBytes}, {RunDepthwise, DepthwiseBytes},
    {RunDepthwiseWeightGrad, DepthwiseWeightGradBytes}};

}  // namespace tracea::cpu
