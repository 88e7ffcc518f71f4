// Convolutions of bf16 operands for AVX-512 BF16, unless each channel has a kernel of its
// own.

#include "conv2d/conv2d.h"

#include <string.h>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Bf16Tile
#define TRACEA_WORDS_OF_BF16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "conv2d/vectors_impl.h"
}  // namespace

extern const ConvIsa kAvx512Bf16Conv;
const ConvIsa kAvx512Bf16Conv = {
    Isa::kAvx512Bf16, kTileM, kTileN, sizeof(BF16), kMostSums,
    {RunConvAs<BF16>, ConvBytes}, {RunWeightGradAs<BF16>, WeightGradBytes}, {}, {}, true};

}  // namespace tracea::cpu
