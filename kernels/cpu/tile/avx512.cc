// Micro-kernels for AVX-512 F, BW, DQ and VL.

#include <cstdint>

#include <immintrin.h>

#include "common/micro_kernels.h"

#define TRACEA_LANES 16
#define TRACEA_TILE kAvx512Tile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/tile_impl.h"
}  // namespace

constexpr TileKernels kAvx512Tile = AllMicroKernels();

}  // namespace tracea::cpu
