// Some channels of some whole images in shared memory, with zeros around each, so that a tap
// is an offset and the pixels of all results can be counted through.
//
//   smem   images of kSpan rows of kSpan pixels of kPitchBytes each
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/common.cuh"

namespace tracea {

// Rows or columns: result * kStride + kStep * tap + kFirst is an entry of what is read.
template <int kInExtent, int kOutExtent, int kTapCount, int kStrideOf, int kStepOf, int kFirstOf>
struct WholeAxis {
  static constexpr int kIn = kInExtent, kOut = kOutExtent, kTaps = kTapCount;
  static constexpr int kStride = kStrideOf, kStep = kStepOf, kFirst = kFirstOf;
  static constexpr int kSpan = (kOut - 1) * kStride + (kTaps - 1) * kStep + 1;
};

// Elements of 16 bits; Rows and Columns are a WholeAxis each.
template <class Rows, class Columns, int kChannels, int kThreads>
struct WholeImages {
  static constexpr int kPixels = Rows::kOut * Columns::kOut;  // of a result
  static constexpr int kPitchBytes = kChannels * 2 + 16;  // eight neighbours in banks of their own
  static constexpr int kSpan = Rows::kSpan * Columns::kSpan;
  static constexpr int kImageBytes = kSpan * kPitchBytes;
  static constexpr int kUnits = kChannels / 8;  // of 16 bytes, of a pixel
  static_assert(kThreads % kUnits == 0, "a thread keeps to its channels");

  const void* source;
  u32 smem;
  int images, channels;             // of the source
  int first_image, first_channel;  // of those that are here

  // Begins to copy images begin .. end - 1 of those here.
  TRACEA_DEVICE void fetch(int begin, int end) const {
    constexpr int kStep = kThreads / kUnits;
    const int unit = static_cast<int>(threadIdx.x) % kUnits;
    const int channel = first_channel + unit * 8;
    const auto* from = static_cast<const u16*>(source) + channel;
    int place = begin * kSpan + static_cast<int>(threadIdx.x) / kUnits;
#pragma unroll 4
    for (; place < end * kSpan; place += kStep) {
      const int image = first_image + place / kSpan, in_image = place % kSpan;
      const int row = in_image / Columns::kSpan + Rows::kFirst;
      const int column = in_image % Columns::kSpan + Columns::kFirst;
      const bool inside = channel < channels && image < images && row >= 0 &&
                          row < Rows::kIn && column >= 0 && column < Columns::kIn;
      const i64 pixel = (static_cast<i64>(image) * Rows::kIn + row) * Columns::kIn + column;
      cp_async_or_zero<16>(smem + place * kPitchBytes + unit * 16,
                           inside ? from + pixel * channels : source, inside);
    }
  }

  // Where tap (0, 0) of a result is, counted through the images here.
  TRACEA_DEVICE u32 window(u32 pixel) const {
    const u32 image = pixel / kPixels, in_image = pixel % kPixels;
    const u32 row = in_image / Columns::kOut * Rows::kStride;
    const u32 column = in_image % Columns::kOut * Columns::kStride;
    return smem + image * kImageBytes + (row * Columns::kSpan + column) * kPitchBytes;
  }

  // From there to another tap.
  TRACEA_HOST_DEVICE static constexpr int offset(int tap) {
    const int row = tap / Columns::kTaps * Rows::kStep;
    const int column = tap % Columns::kTaps * Columns::kStep;
    return (row * Columns::kSpan + column) * kPitchBytes;
  }
};

// Waits for the copies of part `part` of kParts, of which each is a group.
template <int kParts>
TRACEA_DEVICE void wait_for_part(int part) {
  static_assert(kParts <= 4, "each wait is an instruction of its own");
  const int younger = kParts - 1 - part;
  if (younger == 0) cp_async_wait_group<0>();
  if (younger == 1) cp_async_wait_group<1>();
  if (younger == 2) cp_async_wait_group<2>();
  if (younger == 3) cp_async_wait_group<3>();
}

// Images in parts 0 .. part, of all that a block has.
template <int kImages, int kParts>
TRACEA_HOST_DEVICE constexpr int end_of_part(int part) {
  return kImages * (part + 1) / kParts;
}

}  // namespace tracea
