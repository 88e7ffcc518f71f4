// Rows of one head as operands of the tensor cores: how they lie in shared memory, the two
// ways to contract them, and how 64 rows of a result leave.
//
// A tile is kRows rows of kHeadDim columns, in slabs of 64 columns: 128 swizzled bytes a
// row. What the last slab has more is read as zeros, and not written.
//
//     a b'   contracted along the head's columns      both as they lie (K-major)
//     f b    f contracted with the rows of b          f in registers, b along rows (MN-major)
//
// Places are counted in units of 16 bytes of shared memory, as descriptors count them.
// PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"

namespace tracea {

constexpr u32 kConsumerUnits = 64 * 128 / 16;  // from a consumer's 64 rows to the next's

// One number is kept for all operands: what else a descriptor says is constant.
template <class Descriptor>
TRACEA_DEVICE u64 descriptor_at(u32 units) {
  constexpr u64 kRest = Descriptor::encode(0);
  return (kRest & ~u64{0xFFFFFFFFu}) | (static_cast<u32>(kRest) + units);
}

template <int kRows_, int kHeadDim>
struct HeadTile {
  static constexpr int kRows = kRows_, kSlabs = ceil_div(kHeadDim, 64);
  static constexpr u32 kSlabBytes = kRows * 128;
  static constexpr u32 kBytes = kSlabs * kSlabBytes;
  static constexpr u32 kUnits = kBytes / 16;
  using AlongColumns = OperandDescriptor<false, 0>;
  using AlongRows = OperandDescriptor<true, kSlabBytes>;

  // Of 16 columns; the step's place from the tile's start.
  static constexpr int kSteps = ceil_div(kHeadDim, 16);
  TRACEA_HOST_DEVICE static constexpr u32 column_units(int step) {
    return step / 4 * (kSlabBytes / 16) + step % 4 * AlongColumns::kStep;
  }

  // Starts the copy of the rows from `row` on; `barrier` expects kBytes for it.
  TRACEA_DEVICE static void copy(u32 to, const TensorMap* map, int row, int head,
                                 int example, u32 barrier) {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      cp_async_bulk_tensor_4d(to + slab * kSlabBytes, map, slab * 64, row, head, example,
                              barrier);
    }
  }
};

// c = a b', not waited for: 64 rows of a tile A from `a` on, a tile B at `b`.
template <class Product, class A, class B>
TRACEA_DEVICE void multiply_columns(float (&c)[Product::kAccumulators], u32 a, u32 b) {
  static_assert(Product::kN == B::kRows && A::kSteps == B::kSteps, "one instruction a step");
  TRACEA_UNROLL
  for (int step = 0; step < A::kSteps; ++step) {
    Product::mma(c, descriptor_at<typename A::AlongColumns>(a + A::column_units(step)),
                 descriptor_at<typename B::AlongColumns>(b + B::column_units(step)),
                 step != 0);
  }
  wgmma_commit_group();
}

// c += f b, not waited for; b is a tile B.
template <class Product, class B, int kSteps>
TRACEA_DEVICE void multiply_rows(float (&c)[Product::kAccumulators],
                                 const u32 (&f)[kSteps][4], u32 b) {
  static_assert(B::kRows == 16 * kSteps, "steps of 16 rows");
  TRACEA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    Product::mma(c, f[step],
                 descriptor_at<typename B::AlongRows>(b + step * B::AlongRows::kStep), true);
  }
  wgmma_commit_group();
}

// Registers 4 block .. 4 block + 3 of an accumulator, the block's 8 columns, become half of
// the fragment of 16 columns.
template <class Element, int kSteps>
TRACEA_DEVICE void round_block(u32 (&f)[kSteps][4], int block, const float (&c)[4]) {
  f[block / 2][block % 2 * 2] = Packed<Element>::from({c[0], c[1]}).bits;
  f[block / 2][block % 2 * 2 + 1] = Packed<Element>::from({c[2], c[3]}).bits;
}

// Rounds 64 rows of a result into shared memory, where a tile lies whose rows nobody reads
// any more. Of the warpgroup's threads each warp stages its own 16 rows.
template <class Element, class Swizzle, class Tile, int kCount>
TRACEA_DEVICE void stage_rows(const float (&c)[kCount], u32 to, int thread) {
  TRACEA_UNROLL
  for (int block = 0; block < kCount / 4; block += 2) {
    u32 packed[4];
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * block + 2 * i;
      packed[i] = at < kCount ? Packed<Element>::from({c[at], c[at + 1]}).bits : 0u;
    }
    stmatrix_x4(
        to + block / 8 * Tile::kSlabBytes + stmatrix_x4_byte<Swizzle>(thread, block % 8),
        packed[0], packed[1], packed[2], packed[3]);
  }
}

// Starts the copy of the 16 rows that the warp has staged, of kColumns columns from slab
// `first` on, which are the rows from `row` on of the head. One thread of the warp.
template <class Tile, int kColumns>
TRACEA_DEVICE void store_rows(const TensorMap* map, u32 from, int first, int row, int head,
                              int example) {
  TRACEA_UNROLL
  for (int slab = 0; slab < ceil_div(kColumns, 64); ++slab) {
    cp_async_bulk_tensor_4d_store(map, from + slab * Tile::kSlabBytes, (first + slab) * 64, row,
                                  head, example);
  }
}

// The end of a warp that has staged its rows: `start` starts their copies, with the warp's
// first row of the warpgroup's, in one thread.
template <class Start>
TRACEA_DEVICE void store_staged_rows(int thread, Start start) {
  fence_proxy_async_shared();
  __syncwarp();
  if (!elect_one()) return;
  start(thread / kWarpSize * 16);
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group_read<0>();  // shared memory must outlive the copies out of it
}

}  // namespace tracea
