// Micro-kernels for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include <cstdint>

#include "common/micro_kernels.h"

#define TRACEA_LANES 4
#define TRACEA_TILE kBaselineTile

namespace tracea::cpu {
namespace {
#include "common/vec_impl.h"
#include "common/tile_impl.h"
}  // namespace

constexpr TileKernels kBaselineTile = AllMicroKernels();

}  // namespace tracea::cpu
