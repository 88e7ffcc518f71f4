// Rows of NHWC images in shared memory, first as they are, then with channels first, so that
// neighbouring columns of a channel are operands of the tensor cores.
//
//   a row as it arrives   kImages x 8 kUnits pixels of kChannels, kPitch bytes apart
//   the row turned        of each channel: kImages x kUnits units, of 8 columns each
//
// ldmatrix reads 8 pixels of 8 channels transposed, and stmatrix writes them as 8 units. The
// pitches are odd numbers of 16 bytes, so that neither conflicts.
//
// Assumes 16-bit elements, and channels in multiples of 8. PTX ISA: "cp.async", "ldmatrix",
// "stmatrix".
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/opaque.cuh"

namespace tracea {

constexpr int kUnitColumns = 8, kUnitBytes = 16;

// Some images: where they are, and what a block reads of them first.
struct ImageBlock {
  const void* data;
  int batch, height, width, channels;
  int image, row, column, channel;  // columns below zero are outside, rows are not
};

// kColumns are copied; those behind them are zeros, see `clear`.
template <int kImages, int kColumns, int kUnits, int kChannels, int kThreads>
class TurnedRows {
 public:
  static constexpr int kOctets = kChannels / 8;
  static constexpr int kPitch = kChannels * 2 + 16;
  static constexpr int kPixels = kUnits * kUnitColumns;  // of an image
  static constexpr int kRowBytes = kImages * kPixels * kPitch;
  static constexpr int kChannelPitch = (kImages * kUnits | 1) * kUnitBytes;
  static constexpr int kTurnedBytes = kChannels * kChannelPitch;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kCopyUnits = kImages * kColumns * kOctets;
  static constexpr int kCopies = ceil_div(kCopyUnits, kThreads);
  static constexpr int kSquares = kImages * kUnits * kOctets;  // of 8 pixels, 8 channels
  static constexpr int kTurns = ceil_div(kSquares, 4 * kWarps);
  static constexpr int kUnitsOfTurn = 4 * kWarps / kOctets;
  static_assert(kColumns <= kPixels, "units hold what is copied");

  // The next row is `x.row`.
  TRACEA_DEVICE void begin(const ImageBlock& x) {
    inside_ = 0;
    // So that a loop over tiles does not keep what follows in registers.
    const int self = opaque(thread());
    TRACEA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      const int any = self + i * kThreads;
      const int unit = any < kCopyUnits ? any : kCopyUnits - 1, pixel = unit / kOctets;
      const int image = pixel / kColumns, column = pixel % kColumns;
      const int channel = x.channel + unit % kOctets * 8, at = x.column + column;
      const bool inside =
          x.image + image < x.batch && at >= 0 && at < x.width && channel < x.channels;
      const i64 line = (x.image + image) * static_cast<i64>(x.height) + x.row;
      const i64 first = ((line * x.width + at) * x.channels + channel) * 2;
      source_[i] = static_cast<const u8*>(x.data) + (inside ? first : 0);
      target_[i] = (image * kPixels + column) * kPitch + unit % kOctets * kUnitBytes;
      if (inside) inside_ |= 1u << i;
    }
    square_ = self / 8;
    const int square = square_ < kSquares ? square_ : kSquares - 1, line = self % 8;
    const int octet = square % kOctets, unit = square / kOctets;
    from_ = (kUnitColumns * unit + line) * kPitch + octet * kUnitBytes;
    to_ = (8 * octet + line) * kChannelPitch + unit * kUnitBytes;
  }

  // Zeros in the columns that are never copied, of rows one after another.
  TRACEA_DEVICE static void clear(u32 smem, int rows) {
    constexpr int kRest = (kPixels - kColumns) * kPitch / 4;
    if constexpr (kRest > 0) {
      for (int i = thread(); i < rows * kImages * kRest; i += kThreads) {
        const int image = i / kRest, word = i % kRest;
        st_shared(smem + (image * kPixels + kColumns) * kPitch + 4 * word, 0u);
      }
    }
  }

  // Starts the copies of the next row to `smem`. Rows are so many bytes apart.
  TRACEA_DEVICE void start(u32 smem, u32 row_bytes) {
    TRACEA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      // Where all threads have a copy or none, some repeat the last one instead.
      if (kCopies == 1 || thread() + i * kThreads < kCopyUnits) {
        const bool inside = inside_ >> i & 1u;
        cp_async_or_zero<kUnitBytes>(smem + target_[i], source_[i], inside);
        source_[i] += inside ? row_bytes : 0u;
      }
    }
  }

  // Reads a part of a row that has landed, transposed.
  TRACEA_DEVICE void read(Words& part, u32 row) const { ldmatrix_x4_trans(part.w, row + from_); }

  // Writes that part, and turns what else there is of the row.
  TRACEA_DEVICE void write(const Words& part, u32 row, u32 turned) const {
    stmatrix_x4(turned + to_, part.w[0], part.w[1], part.w[2], part.w[3]);
    TRACEA_UNROLL
    for (int i = 1; i < kTurns; ++i) {
      if (4 * (warp() + i * kWarps) < kSquares) {
        // Lanes without a square repeat their first.
        const bool is_own = kSquares % 4 == 0 || square_ + 4 * i * kWarps < kSquares;
        const int units = is_own ? i * kUnitsOfTurn : 0;
        Words next;
        ldmatrix_x4_trans(next.w, row + from_ + units * kUnitColumns * kPitch);
        stmatrix_x4(turned + to_ + units * kUnitBytes, next.w[0], next.w[1], next.w[2],
                    next.w[3]);
      }
    }
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int lane() { return thread() % kWarpSize; }
  TRACEA_DEVICE static int warp() { return warp_uniform(thread() / kWarpSize); }

  const u8* source_[kCopies];  // of the next row; anything that exists if that is outside
  u32 target_[kCopies], inside_;
  int square_;  // that the lane begins with
  u32 from_, to_;
};

}  // namespace tracea
