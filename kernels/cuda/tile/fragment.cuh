// Which element of a tile each register holds, and where a tile is staged for its store.
//
// wgmma.m64nNk16 accumulator: warp w of the warpgroup owns rows 16w .. 16w+15; inside
// them every 8-column block looks like mma.m16n8k16's C fragment (g = lane/4, t = lane%4):
//
//            cols 2t, 2t+1
//   row g      c0  c1          block j of 8 columns holds registers 4j .. 4j+3
//   row g+8    c2  c3
//
// PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", "... m64nNk8" and
// "mma.m16n8k16".
// tracea_jax/ir/lanes.py is the same algebra in Python.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Row in 0..63 of register i of `thread` (0..127 in its warpgroup).
TRACEA_HOST_DEVICE constexpr int wgmma_accumulator_row(int thread, int i) {
  return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i / 2) % 2);
}

// Column in 0..N-1 of register i in 0 .. N/2-1.
TRACEA_HOST_DEVICE constexpr int wgmma_accumulator_col(int thread, int i) {
  return 8 * (i / 4) + 2 * (thread % 4) + i % 2;
}

// TF32 A of wgmma.m64nNk8 in registers: register i in 0..3 of `thread` is (row, k).
TRACEA_HOST_DEVICE constexpr int wgmma_tf32_a_row(int thread, int i) {
  return wgmma_accumulator_row(thread, 2 * i);
}
TRACEA_HOST_DEVICE constexpr int wgmma_tf32_a_col(int thread, int i) {
  return thread % 4 + 4 * (i / 2);
}

// Which column of a slab of 64 becomes row `row` of such a fragment: a permutation of the
// bits of its number. The two rows of a thread, g and g + 8, are neighbouring columns, 2j
// and 2j + 1. Those of the rows g = 0..3 or 4..7 lie in two chunks of four columns, four
// chunks apart, so that reads in 128-byte swizzled rows of 32 columns do not conflict.
TRACEA_HOST_DEVICE constexpr int paired_column(int row) {
  return (row & 32) | (row & 2) << 3 | (row & 16) >> 1 | (row & 4) | (row & 1) << 1 |
         (row & 8) >> 3;
}

// mma.sync m16n8k16, 16-bit operands: (row, col) of A, (k, n) of B, (row, col) of C.
TRACEA_HOST_DEVICE constexpr int mma_a_row(int lane, int i) {
  return lane / 4 + 8 * ((i / 2) % 2);
}
TRACEA_HOST_DEVICE constexpr int mma_a_col(int lane, int i) {
  return 2 * (lane % 4) + i % 2 + 8 * (i / 4);
}
TRACEA_HOST_DEVICE constexpr int mma_b_row(int lane, int i) {
  return 2 * (lane % 4) + i % 2 + 8 * (i / 2);
}
TRACEA_HOST_DEVICE constexpr int mma_b_col(int lane, int) { return lane / 4; }
TRACEA_HOST_DEVICE constexpr int mma_c_row(int lane, int i) {
  return lane / 4 + 8 * (i / 2);
}
TRACEA_HOST_DEVICE constexpr int mma_c_col(int lane, int i) {
  return 2 * (lane % 4) + i % 2;
}

// stmatrix.x4 of a 16x16 block of 16-bit accumulators (two 8-column blocks of a warp).
// Register pair p = {c[2p], c[2p+1]}, packed to 32 bits, is 8x8 matrix p:
//
//            cols 0-7   cols 8-15
//   rows 0-7    p0         p2        lanes 8p .. 8p+7 supply the addresses of the
//   rows 8-15   p1         p3        eight 16-byte rows of matrix p
//
// Row and column, inside the block, of the 16 bytes that `lane` points at. ldmatrix.x4
// with the same addresses loads mma's A fragment.
TRACEA_HOST_DEVICE constexpr int stmatrix_x4_row(int lane) { return lane % 16; }
TRACEA_HOST_DEVICE constexpr int stmatrix_x4_col(int lane) { return 8 * (lane / 16); }

// 32-bit accumulators are staged by 8-byte stores of {c[2p], c[2p+1]}. In 128-byte
// swizzled rows the plain order is a two-way bank conflict: the rows g and g^1 of one
// store swap the same two chunks. Odd rows therefore take the 8-column blocks of every
// group of four in the order 2, 3, 0, 1. The block that a lane or thread stores in step j:
TRACEA_HOST_DEVICE constexpr int staggered_block(int lane, int j) {
  return j ^ (2 * ((lane / 4) % 2));
}

// Two registers of 8-column block b that are neighbours in a row of the result, which is
// the accumulated product or, its rows being paired columns, the transposed product:
//
//                 straight                transposed
//   registers     4b + 2h, 4b + 2h + 1    4b + h, 4b + h + 2        h = 0, 1
//   row           16w + g + 8h            8b + 2t + h
//   columns       8b + 2t, + 1            paired_column(16w + g), + 1
template <bool kTransposed>
struct PairPlace {
  static constexpr int kNext = kTransposed ? 2 : 1;

  TRACEA_HOST_DEVICE static constexpr int first_register(int block, int half) {
    return 4 * block + (kTransposed ? half : 2 * half);
  }
  TRACEA_HOST_DEVICE static constexpr int row(int thread, int block, int half) {
    const int i = first_register(block, half);
    return kTransposed ? wgmma_accumulator_col(thread, i) : wgmma_accumulator_row(thread, i);
  }
  TRACEA_HOST_DEVICE static constexpr int col(int thread, int block) {
    return kTransposed ? paired_column(wgmma_accumulator_row(thread, 0))
                       : wgmma_accumulator_col(thread, 4 * block);
  }
};

// A sub-tile of 64 rows x 128 bytes is staged in shared memory, swizzled and aligned to
// the swizzle's period, as one box of the output's tensor map. Bytes from its start:

// What `thread` of the warpgroup supplies to stmatrix.x4 for the 16-bit elements of the
// 8-column blocks `block` (even) and block + 1.
template <class Swizzle>
TRACEA_HOST_DEVICE constexpr u32 stmatrix_x4_byte(int thread, int block) {
  const int lane = thread % kWarpSize;
  const int row = 16 * (thread / kWarpSize) + stmatrix_x4_row(lane);
  return Swizzle::apply(128 * row + 2 * (8 * block + stmatrix_x4_col(lane)));
}

// Where `thread` stores two neighbouring 32-bit elements in step j: registers
// 4b + 2 half and 4b + 2 half + 1 of block b = staggered_block(thread, j).
template <class Swizzle>
TRACEA_HOST_DEVICE constexpr u32 accumulator_pair_byte(int thread, int j, int half) {
  const int row = wgmma_accumulator_row(thread, 2 * half);
  const int col = 8 * staggered_block(thread, j) + wgmma_accumulator_col(thread, 0);
  return Swizzle::apply(128 * row + 4 * col);
}

// A sub-tile of the transposed product, 64 columns of 128 bytes before, is one box of rows
// of 64 16-bit elements or two of rows of 32 f32. In plain order the rows 2t + h of one
// store of pairs, t = 0..3, conflict: lanes where t is 1 or 2 take the two halves in the
// other order. The half that a thread stores in step j:
TRACEA_HOST_DEVICE constexpr int staggered_half(int thread, int j) {
  return j ^ ((thread ^ thread / 2) & 1);
}

// Where `thread` stores the pair of block 0, half staggered_half(thread, j), in step j, and
// how far the pair of the next block is from there.
template <class Swizzle, int kElementBytes>
TRACEA_HOST_DEVICE constexpr u32 transposed_pair_byte(int thread, int j) {
  constexpr int kColumns = 128 / kElementBytes;  // of a box, and its rows
  const int row = PairPlace<true>::row(thread, 0, staggered_half(thread, j));
  const int col = PairPlace<true>::col(thread, 0);
  return 128 * kColumns * (col / kColumns) +
         Swizzle::apply(128 * row + kElementBytes * (col % kColumns));
}
constexpr u32 kTransposedBlockBytes = 8 * 128;  // the period of the swizzle

}  // namespace tracea
