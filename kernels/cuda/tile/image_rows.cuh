// Rows of NHWC images on their way to shared memory: some columns and channels of one row at
// a time, zeros for what is outside of the image.
//
//   smem   kColumns pixels of kPitchBytes each, kChannels elements of a pixel
//
// All threads copy a row together, in units of kCopyBytes that no pixel's channels end
// within. A thread copies the same channels of pixels that lie kColumnStep apart.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_store.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Element, int kColumns, int kChannels, int kCopyBytes, int kPitchBytes,
          int kThreads>
class ImageRows {
 public:
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kRowBytes = kColumns * kPitchBytes;
  static constexpr int kUnitsOfPixel = kChannels * kElementBytes / kCopyBytes;
  static constexpr int kUnits = kColumns * kUnitsOfPixel;
  static constexpr int kCopies = ceil_div(kUnits, kThreads);
  static constexpr int kColumnStep = kThreads / kUnitsOfPixel;
  static_assert(kUnitsOfPixel * kCopyBytes == kChannels * kElementBytes,
                "a pixel's channels are whole units");
  static_assert(kThreads % kUnitsOfPixel == 0, "a thread keeps to its channels");
  static_assert(kCopies <= 32, "a word says which columns are inside");
  static_assert(kPitchBytes % kCopyBytes == 0 && kPitchBytes >= kChannels * kElementBytes,
                "units are aligned, pixels apart");

  // Of the image at `image`, from this column and channel on; either may be outside.
  TRACEA_DEVICE ImageRows(const void* image, int width, int channels, int column,
                          int channel)
      : row_bytes_(static_cast<i64>(width) * channels * kElementBytes),
        step_bytes_(static_cast<i64>(kColumnStep) * channels * kElementBytes) {
    const int unit = thread() % kUnitsOfPixel * (kCopyBytes / kElementBytes);
    const int first = thread() / kUnitsOfPixel;
    column += first;
    channel += unit;
    source_ = static_cast<const u8*>(image) +
              (static_cast<i64>(column) * channels + channel) * kElementBytes;
    target_ = static_cast<u32>(first * kPitchBytes + unit * kElementBytes);
    inside_ = 0;
    TRACEA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      const int at = column + i * kColumnStep;
      if (channel < channels && at >= 0 && at < width) inside_ |= 1u << i;
    }
  }

  // Starts the copies of row `row` to `smem`; zeros if that row is outside.
  TRACEA_DEVICE void start(u32 smem, int row, bool is_inside) const {
    const u8* source = source_ + row * row_bytes_;
    TRACEA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      // Only the last copy may have no pixel for some threads.
      if (i + 1 < kCopies || thread() + i * kThreads < kUnits) {
        const bool inside = is_inside && (inside_ >> i & 1u);
        cp_async_or_zero<kCopyBytes>(smem + target_ + i * kColumnStep * kPitchBytes,
                                     inside ? source + i * step_bytes_ : source_, inside);
      }
    }
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }

  const i64 row_bytes_, step_bytes_;
  const u8* source_;
  u32 target_, inside_;  // a bit for each copy
};

// Two neighbouring channels of a pixel in shared memory.
template <class Element>
TRACEA_DEVICE Pair shared_pair(u32 pixel) {
  if constexpr (sizeof(Element) == 2) {
    Packed<Element> packed;
    ld_shared(pixel, packed.bits);
    return packed.widen();
  } else {
    return ld_shared_pair(pixel);
  }
}

}  // namespace tracea
