// An operand that the tensor cores take from registers: how a warpgroup reads its fragments.
//
// wgmma reads 4-byte elements from shared memory only if they are stored along k. The left
// operand may come from registers instead. Then its tile may be stored along m: slabs of 32
// columns, one row of 128 swizzled bytes for each of the 32 k of a stage. A step contracts
// 8 k, of which thread 32w + 4g + t holds t and t + 4, in the fragment's rows 16w + g and
// 16w + g + 8:
//
//   straight   rows are columns of the tile. Each of the four words is a load; those of a
//              warp take two wavefronts, as even and odd k meet in the same banks.
//   paired     rows are paired columns, see paired_column: each k is one load of two words,
//              free of bank conflicts. Who reads the accumulators must know.
//
// Registers of a wgmma in flight must not be written, and the compiler proves it only within
// the body of a loop: it serializes products that are in flight across the loop's end.
//
// tracea_jax/ir/register_operand.py is the same algebra in Python.
#pragma once

#include "ptx/shared_store.cuh"
#include "tile/common.cuh"
#include "tile/register_operand_map.cuh"

namespace tracea {

template <class Map>
class RegisterOperand {
 public:
  TRACEA_DEVICE explicit RegisterOperand(int thread) : first_(Map::first_byte(thread)) {}

  // Reads a step of the tile of 64 kSlabs columns at `tile`.
  template <int kSlabs>
  TRACEA_DEVICE void load(u32 (&fragments)[kSlabs][4], u32 tile, int step) const {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      u32(&r)[4] = fragments[slab];
      TRACEA_UNROLL
      for (int i = 0; i < 4; i += Map::kWords) {
        const u32 address = tile + Map::byte(first_, slab, step, i);
        if constexpr (Map::kWords == 2) {
          ld_shared(address, r[i], r[i + 1]);
        } else {
          ld_shared(address, r[i]);
        }
      }
    }
  }

 private:
  const u32 first_;
};

}  // namespace tracea
