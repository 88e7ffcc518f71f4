// Micro-kernels for AVX2 with FMA.

#include <cstdint>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 8
#define TRACEA_TILE kAvx2Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/tile_impl.h"
}  // namespace

constexpr TileKernels kAvx2Tile = AllMicroKernels();

}  // namespace tracea::cpu
