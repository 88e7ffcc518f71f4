// How a warpgroup stages 64 rows x 128 bytes of a tile in shared memory, the widest box of a
// swizzled tensor map, and reads them from there: each thread the pairs that it holds of the
// accumulators, see fragment.cuh.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_store.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"

namespace tracea {

// A sub-tile and its chunks: two blocks of 8 columns that a warpgroup stages together.
template <class Element>
struct SubTile {
  static constexpr int kRows = 64;
  static constexpr int kRowBytes = 128;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kBlocks = kColumns / 8;
  static constexpr int kChunks = kBlocks / 2;
  // The same 64 rows transposed: boxes of kColumns rows of 128 bytes.
  static constexpr int kTransposedBoxes = kRows / kColumns;

  // The blocks of a chunk: neighbours for stmatrix, two apart for staggered f32 stores.
  static constexpr int block(int chunk, int i) {
    return sizeof(Element) == 2 ? 2 * chunk + i : chunk + 2 * i;
  }
};

// What a thread holds of a chunk: [block][upper or lower 8 rows of the warp's 16].
template <class Element>
struct Chunk {
  Packed<Element> pairs[2][2];
};

// Writes a chunk of 16-bit elements to its swizzled place in a sub-tile.
template <class Swizzle, class Element>
TRACEA_DEVICE void stage(u32 buffer, int thread, int chunk, const Chunk<Element>& c) {
  const u32 byte =
      stmatrix_x4_byte<Swizzle>(thread, SubTile<Element>::block(chunk, 0));
  stmatrix_x4(buffer + byte, c.pairs[0][0].bits, c.pairs[0][1].bits, c.pairs[1][0].bits,
              c.pairs[1][1].bits);
}

// The same for f32. Odd rows take the two blocks in the other order, to keep off the banks
// of their even neighbours.
template <class Swizzle>
TRACEA_DEVICE void stage(u32 buffer, int thread, int chunk, const Chunk<float>& c) {
  TRACEA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int straight = SubTile<float>::block(chunk, i);
    const bool keeps_order = staggered_block(thread, straight) == straight;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const u32 byte = accumulator_pair_byte<Swizzle>(thread, straight, half);
      const Pair kept = c.pairs[i][half].value, crossed = c.pairs[1 - i][half].value;
      st_shared(buffer + byte, keeps_order ? kept : crossed);
    }
  }
}

// Reads a chunk of 16-bit elements from where `stage` writes it.
template <class Swizzle, class Element>
TRACEA_DEVICE void unstage(u32 buffer, int thread, int chunk, Chunk<Element>& c) {
  u32 pairs[4];
  ldmatrix_x4(pairs, buffer + stmatrix_x4_byte<Swizzle>(
                                  thread, SubTile<Element>::block(chunk, 0)));
  TRACEA_UNROLL
  for (int i = 0; i < 4; ++i) c.pairs[i / 2][i % 2].bits = pairs[i];
}

// The same for f32.
template <class Swizzle>
TRACEA_DEVICE void unstage(u32 buffer, int thread, int chunk, Chunk<float>& c) {
  const int first = SubTile<float>::block(chunk, 0);
  const bool keeps_order = staggered_block(thread, first) == first;
  TRACEA_UNROLL
  for (int half = 0; half < 2; ++half) {
    Pair found[2];
    TRACEA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int straight = SubTile<float>::block(chunk, i);
      const u32 byte = accumulator_pair_byte<Swizzle>(thread, straight, half);
      found[i] = ld_shared_pair(buffer + byte);
    }
    c.pairs[0][half].value = keeps_order ? found[0] : found[1];
    c.pairs[1][half].value = keeps_order ? found[1] : found[0];
  }
}

TRACEA_DEVICE void store_pair(u32 address, const Packed<float>& v) {
  st_shared(address, v.value);
}
template <class Element>
TRACEA_DEVICE void store_pair(u32 address, const Packed<Element>& v) {
  st_shared(address, v.bits);
}

// Writes a chunk of the transposed result in pairs: 8 bytes of f32, or a word of 16-bit
// elements. Some lanes take the two halves in the other order, to keep off the banks of the
// others.
template <class Swizzle, class Element>
TRACEA_DEVICE void stage_transposed(u32 buffer, int thread, int chunk,
                                    const Chunk<Element>& c) {
  const bool keeps_order = staggered_half(thread, 0) == 0;
  TRACEA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int block = SubTile<Element>::block(chunk, i);
    TRACEA_UNROLL
    for (int j = 0; j < 2; ++j) {
      const u32 byte = transposed_pair_byte<Swizzle, sizeof(Element)>(thread, j) +
                       kTransposedBlockBytes * block;
      const Packed<Element> kept = c.pairs[i][j], crossed = c.pairs[i][1 - j];
      store_pair(buffer + byte, keeps_order ? kept : crossed);
    }
  }
}

}  // namespace tracea
