// Which bytes of an operand's tile in shared memory a thread copies, and a lane reads.
//
// A tile is stored in swizzled rows, without padding: one for each m or n and along k, or
// (kMnMajor) one for each k and along m or n. A warp reads it in blocks of 16 of m or n by
// one step, 32 bytes of k. Four registers of a lane hold a block; the halves of the block
// they come from:
//
//              A                        B (two fragments of 8 columns)
//     r0   m 0-7    first k        n 0-7    first k      g = lane / 4, t = lane % 4:
//     r1   m 8-15   first k        n 0-7    second k     row or column g of the half,
//     r2   m 0-7    second k       n 8-15   first k      word t of its 16 bytes of k
//     r3   m 8-15   second k       n 8-15   second k
//
// tracea_jax/ir/operands.py is the same algebra in Python, and proves it.
#pragma once

#include "tile/common.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

constexpr int kStepBytes = 32;  // of k, multiplied by one mma

// What a lane points ldmatrix.x4 at, in a block of 16 rows of two chunks of 16 bytes:
// straight, matrices 0 and 1 lie below each other; crossed, beside each other.
TRACEA_HOST_DEVICE constexpr int ldmatrix_row(int lane, bool crossed) {
  return crossed ? lane % 8 + 8 * (lane / 16) : lane % 16;
}
TRACEA_HOST_DEVICE constexpr int ldmatrix_chunk(int lane, bool crossed) {
  return crossed ? lane / 8 % 2 : lane / 16;
}

// kWarpBlocks: blocks that each warp reads, side by side along m or n.
template <class Swizzle, int kRowBytes, int kElementBytes, bool kIsA, bool kIsMnMajor,
          int kWarpBlocks>
struct OperandMap {
  static constexpr bool kMnMajor = kIsMnMajor;
  static constexpr int kBlocks = kWarpBlocks;
  // Four-byte elements cannot be transposed by ldmatrix: lanes load their own words.
  static constexpr bool kByWords = kMnMajor && kElementBytes == 4;
  static constexpr int kStepRows = kStepBytes / kElementBytes;  // of an MN-major tile
  static constexpr int kBlockBytes = 16 * kElementBytes;        // in such a row
  static_assert((kBlocks & (kBlocks - 1)) == 0, "warps and blocks share no bit");

  // What a lane of `warp`, counted along m or n, reads first.
  TRACEA_HOST_DEVICE static constexpr u32 first_byte(int warp, int lane) {
    const int block = warp * kBlocks;
    if constexpr (kByWords) {
      return Swizzle::apply(lane % 4 * kRowBytes + block * kBlockBytes +
                            lane / 4 * kElementBytes);
    } else {
      const int row = ldmatrix_row(lane, kIsA == kMnMajor);
      const int byte = 16 * ldmatrix_chunk(lane, kIsA == kMnMajor);
      return kMnMajor ? Swizzle::apply(row * kRowBytes + block * kBlockBytes + byte)
                      : Swizzle::apply((16 * block + row) * kRowBytes + byte);
    }
  }

  // How far the block `block` at step `step` is from there, before the swizzle.
  TRACEA_HOST_DEVICE static constexpr u32 distance(int block, int step) {
    return kMnMajor ? step * kStepRows * kRowBytes + block * kBlockBytes
                    : block * 16 * kRowBytes + step * kStepBytes;
  }

  // How far register `i` is from register 0 if lanes load their own words.
  TRACEA_HOST_DEVICE static constexpr u32 word_distance(int i) {
    const int mn_half = kIsA ? i % 2 : i / 2, k_half = kIsA ? i / 2 : i % 2;
    return kByWords ? k_half * 4 * kRowBytes + mn_half * 8 * kElementBytes : 0;
  }

  TRACEA_HOST_DEVICE static constexpr u32 byte(u32 first, int block, int step, int i) {
    return Swizzle::move(first, distance(block, step) + word_distance(i));
  }
};

// All threads copy a tile in units, dealt out along the rows, so that neighbours in a warp
// copy neighbours in memory:
//
//     unit u = thread + i kThreads is unit u % kUnitsPerRow of row u / kUnitsPerRow
template <class Swizzle, int kTileRows, int kTileRowBytes, int kCopyBytes, int kThreads>
struct CopyMap {
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kTileRowBytes;
  static constexpr int kUnitBytes = kCopyBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kUnitsPerRow = kRowBytes / kUnitBytes;
  static constexpr int kUnits = kBytes / kUnitBytes / kThreads;  // of each thread
  static constexpr bool kIsWide = kUnitsPerRow > kThreads;  // than all threads together
  static_assert((kThreads & (kThreads - 1)) == 0, "threads and units share no bit");
  static_assert(kUnits * kThreads * kUnitBytes == kBytes, "threads share evenly");
  static_assert(kIsWide ? kUnitsPerRow % kThreads == 0 : kThreads % kUnitsPerRow == 0,
                "a thread keeps its column, or a row is dealt to all threads");
  static_assert(kRowBytes % kUnitBytes == 0, "rows are whole units");

  // Row of a thread's first unit, and its first byte in it.
  TRACEA_HOST_DEVICE static constexpr int first_row(int thread) {
    return kIsWide ? 0 : thread / kUnitsPerRow;
  }
  TRACEA_HOST_DEVICE static constexpr int first_byte(int thread) {
    return (kIsWide ? thread : thread % kUnitsPerRow) * kUnitBytes;
  }

  // From there to its unit i.
  TRACEA_HOST_DEVICE static constexpr int rows_to(int i) {
    return kIsWide ? i / (kUnitsPerRow / kThreads) : i * (kThreads / kUnitsPerRow);
  }
  TRACEA_HOST_DEVICE static constexpr int bytes_to(int i) {
    return kIsWide ? i % (kUnitsPerRow / kThreads) * kThreads * kUnitBytes : 0;
  }

  // Its place in the tile: units lie there one after another, but for the swizzle.
  TRACEA_HOST_DEVICE static constexpr u32 byte(int thread, int i) {
    return Swizzle::move(Swizzle::apply(thread * kUnitBytes), i * kThreads * kUnitBytes);
  }
};

}  // namespace tracea
