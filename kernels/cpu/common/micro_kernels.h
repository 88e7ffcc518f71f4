// The micro-kernels of each instruction set, and how large its register tiles are.
//
// tile/<isa>.cc compiles them, once for all operations, from common/tile_impl.h.

#ifndef TRACEA_KERNELS_CPU_COMMON_MICRO_KERNELS_H_
#define TRACEA_KERNELS_CPU_COMMON_MICRO_KERNELS_H_

#include <cstdint>

namespace tracea::cpu {

// The product of one register tile: MicroKernel in common/tile_impl.h. `feeds` is a Feeds
// of that file, of the same instruction set, or null.
using MicroKernelFn = void (*)(int64_t words, const float* lhs, const float* rhs,
                               const float* src, int64_t src_stride, float* dst,
                               int64_t dst_stride, void* feeds);

// Those of tiles of up to kRows rows and kVecs vectors.
template <int kRows, int kVecs>
struct MicroKernels {
  static constexpr int kTileRows = kRows, kTileVecs = kVecs;
  MicroKernelFn table[2][kVecs][kRows];  // by LhsOrder, vectors - 1 and rows - 1
};

#if defined(__aarch64__)
// 16 accumulators: 8x12 would fit too, but compilers spill it.
extern const MicroKernels<8, 2> kBaselineTile;
#else
extern const MicroKernels<6, 2> kBaselineTile;  // 12 accumulators of 16 registers
#endif
// 12 accumulators, 2 of rhs and 1 of lhs: 15 of 16 registers.
extern const MicroKernels<6, 2> kAvx2Tile;
// 28 accumulators, 2 of rhs and 1 of lhs: 31 of 32 registers.
extern const MicroKernels<14, 2> kAvx512Tile;
extern const MicroKernels<14, 2> kAvx512Bf16Tile;

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_MICRO_KERNELS_H_
