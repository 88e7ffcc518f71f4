// Micro-kernels for pairs of bf16 by AVX-512 BF16.

#include <cstdint>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Bf16Tile
#define TRACEA_WORDS_OF_BF16

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/tile_impl.h"
}  // namespace

constexpr TileKernels kAvx512Bf16Tile = AllMicroKernels();

}  // namespace tracea::cpu
