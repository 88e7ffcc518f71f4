// How a warp loads the operands of mma.sync from tiles in shared memory.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/common.cuh"
#include "tile/operand_map.cuh"

namespace tracea {

template <class Map>
class OperandReader {
 public:
  TRACEA_DEVICE OperandReader(int warp, int lane) : first_(Map::first_byte(warp, lane)) {}

  // All blocks of one step of the tile at `smem`.
  TRACEA_DEVICE void load(u32 (&r)[Map::kBlocks][4], u32 smem, int step) const {
    TRACEA_UNROLL
    for (int block = 0; block < Map::kBlocks; ++block) {
      if constexpr (Map::kByWords) {
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) {
          r[block][i] = ld_shared_word(smem + Map::byte(first_, block, step, i));
        }
      } else if constexpr (Map::kMnMajor) {
        ldmatrix_x4_trans(r[block], smem + Map::byte(first_, block, step, 0));
      } else {
        ldmatrix_x4(r[block], smem + Map::byte(first_, block, step, 0));
      }
    }
  }

 private:
  const u32 first_;
};

}  // namespace tracea
