// Which element of a tile each register holds, and where a tile is staged for its store.
//
// wgmma.m64nNk16 accumulator: warp w of the warpgroup owns rows 16w .. 16w+15; inside
// them every 8-column block looks like mma.m16n8k16's C fragment (g = lane/4, t = lane%4):
//
//            cols 2t, 2t+1
//   row g      c0  c1          block j of 8 columns holds registers 4j .. 4j+3
//   row g+8    c2  c3
//
// PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16" and "mma.m16n8k16".
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

}  // namespace tracea
