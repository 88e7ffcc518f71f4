// Tiles of the operands of wgmma in shared memory, and their copies by tensor map.
#pragma once

#include "ptx/tma.cuh"
#include "tile/common.cuh"

namespace tracea {

// A tile of one operand: kExtent rows or columns of C by 128 bytes of k, copied by kSharers
// blocks, each its share. Of a K-major tile only the first kLoaded rows exist: where C has
// fewer rows than the tensor cores multiply, what they find in the others stays in the
// others.
template <int kExtent, bool kMnMajor, int kElementBytes, int kSharers, int kLoaded = kExtent>
struct OperandTile {
  static constexpr int kRowElements = 128 / kElementBytes;
  static constexpr int kTileK = kRowElements;
  static constexpr u32 kSlabBytes = kTileK * 128;  // of an MN-major tile
  static constexpr int kSlabs = ceil_div(kExtent, kRowElements);
  static constexpr u32 k64Bytes = 64 * 128;  // 64 rows or columns, both majornesses
  static constexpr u32 kBytes = kMnMajor ? kSlabs * kSlabBytes : kLoaded * 128;
  // Where an extent ends inside its last MN-major slab, rows are copied up to there: their
  // places in shared memory stay 128 bytes.
  static constexpr bool kHasTail = kMnMajor && kExtent % kRowElements != 0;
  static constexpr u32 kCopiedBytes =
      kMnMajor ? kTileK * kExtent * kElementBytes : kLoaded * 128;
  // MN-major slabs are dealt out whole if that is even, else cut along k.
  static constexpr bool kWholeSlabs = kSlabs % kSharers == 0;
  static constexpr int kCopies = kWholeSlabs ? kSlabs / kSharers : kSlabs;
  static constexpr int kBoxK = kWholeSlabs ? kTileK : kTileK / kSharers;
  static constexpr int kBoxRows = kMnMajor ? kBoxK : kLoaded / kSharers;
  static_assert(kExtent % 8 == 0 && kBoxRows % 8 == 0 && kBoxRows <= 256,
                "shares must be whole groups of 8 rows, in one box");
  static_assert(kLoaded == kExtent || (!kMnMajor && kSharers == 1 && kExtent == 64),
                "only a lone K-major slab may be loaded in part");

  // Copies this block's share of the tile at (mn, k) of `batch` to `smem`.
  TRACEA_DEVICE static void copy(u32 smem, const TensorMap* map, const TensorMap* tail,
                                 int mn, int k, int batch, u32 barrier, int share) {
    if constexpr (!kMnMajor) {
      const int row = share * kBoxRows;
      copy_box(smem + row * 128, map, k, mn + row, batch, barrier);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        const int slab = kWholeSlabs ? share * kCopies + i : i;
        const int row = kWholeSlabs ? 0 : share * kBoxK;
        copy_box(smem + slab * kSlabBytes + row * 128,
                 kHasTail && slab == kSlabs - 1 ? tail : map, mn + slab * kRowElements,
                 k + row, batch, barrier);
      }
    }
  }

  TRACEA_DEVICE static void copy_box(u32 smem, const TensorMap* map, int c0, int c1, int c2,
                                     u32 barrier) {
    if constexpr (kSharers == 1) {
      cp_async_bulk_tensor_3d(smem, map, c0, c1, c2, barrier);
    } else {
      constexpr u16 kEveryBlock = (1u << kSharers) - 1u;
      cp_async_bulk_tensor_3d_multicast(smem, map, c0, c1, c2, barrier, kEveryBlock);
    }
  }
};

}  // namespace tracea
