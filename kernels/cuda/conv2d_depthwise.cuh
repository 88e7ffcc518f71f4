// conv2d_depthwise: y[n, p, q, c] = activation(sum over r, s of
// x[n, p * stride + r * dilation - padding, ..(q, s), c] * w[r, s, c] + bias + residual), and
// the gradient of x, which is the same with the taps in reverse and zeros between the rows
// and columns of dy instead of steps. Images are NHWC, sums f32, on every GPU since sm_80.
//
// A block walks down an image, see tile/row_walk.cuh. A thread has two channels and a strip of
// kTileW columns of the result, and adds what it reads of a row to all the rows of the result
// that need it, which take turns in registers: each entry is read from memory once, and from
// shared memory by the threads of two neighbouring strips.
//
//        channels x strips
//   row  [c c c c][c c c c][..] of x, in shared memory
//    |   each thread: kTileW columns of kSlots rows of sums
//    v
//
// Assumes an even number of channels, and that no image has 2^31 elements or more.
// PTX ISA: "cp.async".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/image_rows.cuh"
#include "tile/opaque.cuh"
#include "tile/pixel_epilogue.cuh"
#include "tile/row_walk.cuh"

namespace tracea {

template <class Traits>
class Conv2dDepthwise {
 public:
  using Walk = RowWalk<Traits>;
  using Element = typename Traits::Element;
  using RowTaps = typename Walk::RowTaps;
  using ColumnTaps = AxisTaps<Traits::kTapsW, Traits::kStrideW, Traits::kBetweenW>;

  static constexpr int kTileW = Traits::kTileW;
  static constexpr int kPairs = Traits::kChannels / 2;
  static constexpr int kThreads = kPairs * Traits::kStrips;
  static constexpr int kWindow = ColumnTaps::entries(kTileW);
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  static constexpr int kWeightBytes =
      Traits::kWeightsInRegisters ? 0 : kTaps * kPairs * static_cast<int>(sizeof(float2));

  // Taps that stay in registers widened; more may be widened again for each row.
  static constexpr int kMostWidened = 9;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the strips");
  static_assert(kWeightBytes + Walk::kRingBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");

  TRACEA_DEVICE Conv2dDepthwise(const RowWalkParams& params, u8* smem)
      : p_(params),
        ring_(smem + kWeightBytes),
        walk_(params, ring_),
        weights_(reinterpret_cast<float2*>(smem)),
        pair_(thread() % kPairs),
        own_weights_(weights_ + pair_),
        channel_(walk_.channel + 2 * pair_),
        column_(walk_.column(thread() / kPairs)),
        window_(opaque(shared_address(ring_)) + walk_.window(thread() / kPairs) +
                2 * pair_ * static_cast<int>(sizeof(Element))),
        first_((walk_.line(0) + column_) * p_.channels + channel_),
        row_step_(static_cast<u32>(p_.rows.classes) * p_.columns.out * p_.channels),
        exist_(0) {
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      const int column = column_ + Traits::kClassesW * i;
      const bool exists = column >= 0 && column < p_.columns.out && channel_ < p_.channels;
      if (exists) exist_ |= 1u << i;
    }
  }

  TRACEA_DEVICE void run() {
    if (walk_.results <= 0) return;
    Pair sums[RowTaps::kSlots][kTileW] = {};
    walk_.run([&] { load_weights(); },
              [&](int phase, const u8* row) {
                add(sums, phase, window_ + static_cast<u32>(row - ring_));
              },
              [&](int slot, int result, bool exists) {
                if (exists) store(sums[slot], result);
                clear(sums[slot]);
              });
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static void clear(Pair (&row)[kTileW]) {
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) row[i] = {0.0f, 0.0f};
  }

  // The taps of this block's channels; in reverse for the input's gradient.
  TRACEA_DEVICE void load_weights() {
    const auto* w = static_cast<const Element*>(p_.w);
    if constexpr (Traits::kWeightsInRegisters) {
      TRACEA_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) {
        const Pair pair = load_pair<true>(w + from(tap) * p_.channels + channel_,
                                          p_.channels - channel_);
        kept_[tap] = kTaps <= kMostWidened ? opaque(pair) : pair;
      }
    } else {
      for (int i = thread(); i < kTaps * kPairs; i += kThreads) {
        const int tap = i / kPairs, channel = walk_.channel + 2 * (i % kPairs);
        const Pair pair =
            load_pair<true>(w + from(tap) * p_.channels + channel, p_.channels - channel);
        weights_[i] = make_float2(pair.x, pair.y);
      }
    }
    if constexpr (Traits::kHasBias) bias_ = load_bias<Traits>(p_, channel_);
  }
  TRACEA_DEVICE static i64 from(int tap) { return Traits::kFlips ? kTaps - 1 - tap : tap; }

  TRACEA_DEVICE Pair weight(int tap) const {
    if constexpr (Traits::kWeightsInRegisters) {
      return kept_[tap];
    } else {
      const float2 pair = own_weights_[tap * kPairs];
      return {pair.x, pair.y};
    }
  }

  // Adds a row of the ring to the sums of all results that it belongs to.
  TRACEA_DEVICE void add(Pair (&sums)[RowTaps::kSlots][kTileW], int phase, u32 row) const {
    Pair x[kWindow];
    TRACEA_UNROLL
    for (int i = 0; i < kWindow; ++i) {
      x[i] = shared_pair<Element>(row + i * Traits::kStepW * Traits::kPitchBytes);
    }
    TRACEA_UNROLL
    for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
      const int r = RowTaps::tap(slot, phase);
      if (r >= Traits::kTapsH) continue;
      TRACEA_UNROLL
      for (int s = 0; s < Traits::kTapsW; ++s) {
        const Pair w = weight(r * Traits::kTapsW + s);
        TRACEA_UNROLL
        for (int i = 0; i < kTileW; ++i) {
          const int entry = i * Traits::kStrideW + s;
          if (entry % Traits::kBetweenW == 0) {
            const Pair& value = x[entry / Traits::kBetweenW];
            sums[slot][i].x = fmaf(value.x, w.x, sums[slot][i].x);
            sums[slot][i].y = fmaf(value.y, w.y, sums[slot][i].y);
          }
        }
      }
    }
  }

  // Where a row of the thread's results begins.
  struct Results {
    void *out, *preactivation;
    const void* residual;
  };
  TRACEA_DEVICE Results results(int row) const {
    using ElementOut = typename Traits::ElementOut;
    const i64 first = first_ + static_cast<u32>(row) * row_step_;
    Results of_row{static_cast<ElementOut*>(p_.out) + first, nullptr, nullptr};
    if constexpr (Traits::kSavesPreactivation) {
      of_row.preactivation = static_cast<ElementOut*>(p_.preactivation) + first;
    }
    if constexpr (Traits::kHasResidual) {
      of_row.residual =
          static_cast<const typename Traits::ElementResidual*>(p_.residual) + first;
    }
    return of_row;
  }

  TRACEA_DEVICE void store(const Pair (&sums)[kTileW], int result) const {
    const Results row = results(result);
    const int step = Traits::kClassesW * p_.channels;
    Pair residual[kTileW];  // all are on their way before the first is needed
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      residual[i] = load_residual<Traits>(row, i * step, count(i));
    }
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      store_pixel<Traits>(row, i * step, count(i), sums[i], bias_, residual[i]);
    }
  }

  // The thread's channels of column i of its strip that exist: both, or none.
  TRACEA_DEVICE int count(int i) const { return exist_ >> i & 1u ? 2 : 0; }

  const RowWalkParams& p_;
  u8* const ring_;
  const Walk walk_;
  float2* const weights_;
  const int pair_;
  const float2* const own_weights_;  // one base, so that taps are offsets of an instruction
  const int channel_, column_;
  const u32 window_;         // address in the first row of the ring
  const i64 first_;          // of all elements, the thread's first of result 0
  const u32 row_step_;       // elements from row to row of the results
  u32 exist_;                // a bit for each column of the strip
  Pair bias_{-0.0f, -0.0f};  // adding it changes nothing, where there is none
  Pair kept_[Traits::kWeightsInRegisters ? kTaps : 1];
};

template <class Traits>
TRACEA_DEVICE void conv2d_depthwise(const RowWalkParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dDepthwise<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
