// Which tap joins which entry of an image with which entry of the result, along one axis:
//
//   result * kStride + tap = entry * kBetween            0 <= tap < kTaps
//
// of a convolution with steps (kBetween 1), or of one with kBetween - 1 zeros between the
// entries (kStride 1), which is the input's gradient of one with steps.
//
// Entries come one after another. The results that an entry adds to, and those that are not
// complete, take turns in kSlots slots: result k is in slot k mod kSlots. After kPeriod
// entries the same taps meet the same slots again.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Rows or columns: of what is read, of the result, and how they meet.
struct ImageAxis {
  int in, out;        // extents
  int first_in;       // what meets the first tap of the result `first_out`
  int first_out;      // of the first block; below zero where that is outside
  int class_stride;   // from the first entry of a class to that of the next
  int in_step, classes;  // between entries; classes are also the step between results
  int blocks;
};

// The remainder of an index by `count`; what is left in it is the quotient.
TRACEA_DEVICE u32 take(u32& index, int count) {
  const u32 whole = index / static_cast<u32>(count);
  const u32 rest = index - whole * static_cast<u32>(count);
  index = whole;
  return rest;
}

template <int kTaps, int kStride, int kBetween>
struct AxisTaps {
  static_assert(kStride == 1 || kBetween == 1, "steps, or zeros between");

  static constexpr int kSlots =
      kBetween > 1 ? round_up(kTaps, kBetween) : (kTaps - 1) / kStride + 1;
  static constexpr int kPeriod = kSlots * kStride / kBetween;

  // The tap by which an entry adds to the result in a slot; none if it is not below kTaps.
  TRACEA_HOST_DEVICE static constexpr int tap(int slot, int entry) {
    return modulo(entry * kBetween - slot * kStride);
  }

  // Whether the entry is the last one of the result in a slot.
  TRACEA_HOST_DEVICE static constexpr bool completes(int slot, int entry) {
    return behind(slot, entry) < kBetween;
  }

  // The result that the entry completes in a slot.
  TRACEA_HOST_DEVICE static constexpr int completed(int slot, int entry) {
    return (entry * kBetween + behind(slot, entry) - (kTaps - 1)) / kStride;
  }

  // Entries that a number of results are made of, the first of which is entry 0.
  TRACEA_HOST_DEVICE static constexpr int entries(int results) {
    return ((results - 1) * kStride + kTaps - 1) / kBetween + 1;
  }

 private:
  // How far the last tap of a slot's result is behind the entry.
  TRACEA_HOST_DEVICE static constexpr int behind(int slot, int entry) {
    return modulo(slot * kStride + kTaps - 1 - entry * kBetween);
  }

  TRACEA_HOST_DEVICE static constexpr int modulo(int value) {
    constexpr int kLength = kSlots * kStride;
    const int rest = value % kLength;
    return rest < 0 ? rest + kLength : rest;
  }
};

}  // namespace tracea
