// conv2d_depthwise: y[n, p, q, c] = activation(sum over r, s of
// x[n, p * stride + r * dilation - padding, ...(q, s), c] * w[r, s, c] + bias + residual), and
// the gradient of x, which is the same with the taps in reverse and zeros between the rows
// and columns of dy instead of steps. Images are NHWC, sums f32, on every GPU since sm_80.
//
// A block walks down an image, row by row of what it reads. Rows arrive in a ring in shared
// memory (tile/image_rows.cuh). A thread has two channels and a strip of kTileW columns of the
// result, and adds what it reads of a row to all the rows of the result that need it, which
// take turns in registers (tile/axis_taps.cuh): each entry is read from memory once, and from
// shared memory by the threads of two neighbouring strips.
//
//        channels x strips                   step j:   row j has landed, barrier
//   row  [c c c c][c c c c][..] of x                   start the copies of row j + kStages - 1
//    |   each thread: kTileW columns                   add row j to kSlots rows of sums
//    v                                                 store the sums that are complete
//
// A dilated convolution is several without dilation, on every so-manieth row and column:
// blocks take the rows of one of them, strips the columns. In units of those, `step` rows or
// columns apart, the stride is the one that is left when its common factor with the dilation
// is taken out.
//
// Assumes an even number of channels, and that no image has 2^31 elements or more.
// PTX ISA: "cp.async".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/activation.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"
#include "tile/image_rows.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

struct DepthwiseParams {
  const void* x;         // what is read: x, or dy
  const void* w;         // (R, S, 1, channels)
  const void* bias;      // (channels), or null
  const void* residual;  // of the result's shape, or null
  void* out;
  void* preactivation;  // null unless it is saved
  int channels, channel_blocks;
  ImageAxis rows, columns;
  int block_rows;  // results of a block
};

template <class Traits>
class Conv2dDepthwise {
 public:
  using Element = typename Traits::Element;
  using ElementOut = typename Traits::ElementOut;
  using ElementBias = typename Traits::ElementBias;
  using ElementResidual = typename Traits::ElementResidual;
  using RowTaps = AxisTaps<Traits::kTapsH, Traits::kStrideH, Traits::kBetweenH>;
  using ColumnTaps = AxisTaps<Traits::kTapsW, Traits::kStrideW, Traits::kBetweenW>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kTileW = Traits::kTileW;
  static constexpr int kPairs = Traits::kChannels / 2;
  static constexpr int kThreads = kPairs * Traits::kStrips;
  static constexpr int kBlockColumns = kTileW * Traits::kStrips;  // of the result
  static constexpr int kWindow = ColumnTaps::entries(kTileW);
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  using Rows = ImageRows<Element, Traits::kReadColumns, Traits::kChannels, Traits::kCopyBytes,
                         Traits::kPitchBytes, kThreads>;
  static constexpr int kWeightBytes =
      Traits::kWeightsInRegisters ? 0 : kTaps * kPairs * 2 * static_cast<int>(sizeof(float));

  static_assert(kThreads == Traits::kThreads, "the launch must have all the strips");
  static_assert(kWeightBytes + Traits::kStages * Rows::kRowBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kTileW % Traits::kBetweenW == 0, "strips begin where an entry meets tap 0");
  static_assert(Traits::kStrips % Traits::kClassesW == 0, "classes have as many strips");

  TRACEA_DEVICE Conv2dDepthwise(const DepthwiseParams& params, u8* smem)
      : p_(params), weights_(reinterpret_cast<float2*>(smem)), ring_(smem + kWeightBytes) {
    u32 block = blockIdx.x;
    const int channel_block = static_cast<int>(take(block, p_.channel_blocks));
    const int column_block = static_cast<int>(take(block, p_.columns.blocks));
    const int row_block = static_cast<int>(take(block, p_.rows.blocks));
    image_ = block;
    const int pair = thread() % kPairs, strip = thread() / kPairs;
    channel_ = channel_block * Traits::kChannels + 2 * pair;
    pair_ = pair;

    // Columns of the strip's class.
    const int strip_class = strip % Traits::kClassesW;
    const int strip_first = strip / Traits::kClassesW * kTileW;
    column_ = p_.columns.first_out + column_block * kBlockColumns + strip_class +
              Traits::kClassesW * strip_first;
    read_ = (strip_class * Traits::kClassStrideW +
             strip_first * Traits::kStrideW / Traits::kBetweenW * Traits::kStepW) *
                Traits::kPitchBytes +
            2 * pair * kElementBytes;

    // Rows of the block's class.
    const int row_class = row_block % p_.rows.classes;
    const int row_first = row_block / p_.rows.classes * p_.block_rows;
    row_ = p_.rows.first_out + row_class + p_.rows.classes * row_first;
    in_row_ = p_.rows.first_in + row_class * p_.rows.class_stride +
              p_.rows.in_step * (row_first * Traits::kStrideH / Traits::kBetweenH);
    const int left = ceil_div(p_.rows.out - row_, p_.rows.classes);
    results_ = left < p_.block_rows ? left : p_.block_rows;
    in_column_ = p_.columns.first_in +
                 column_block * (kBlockColumns / Traits::kBetweenW) * Traits::kReadStrideW;
    in_channel_ = channel_block * Traits::kChannels;
  }

  TRACEA_DEVICE void run() {
    if (results_ <= 0) return;
    const u8* image = static_cast<const u8*>(p_.x) +
                      image_ * p_.rows.in * p_.columns.in * p_.channels * kElementBytes;
    const Rows source(image, p_.columns.in, p_.channels, in_column_, in_channel_);
    const int entries = RowTaps::entries(results_);
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load(source, j, j, entries);
    load_weights();

    Pair sums[RowTaps::kSlots][kTileW];
    TRACEA_UNROLL
    for (int slot = 0; slot < RowTaps::kSlots; ++slot) clear(sums[slot]);
    int reading = 0, writing = Ring::load_stage(0);
    TRACEA_NO_UNROLL
    for (int first = 0; first < entries; first += RowTaps::kPeriod) {
      TRACEA_UNROLL
      for (int phase = 0; phase < RowTaps::kPeriod; ++phase) {
        const int j = first + phase;
        if (j < entries) {
          cp_async_wait_group<Ring::kGroupsBehindA>();
          __syncthreads();
          load(source, j + Ring::kPrologueGroups, writing, entries);
          if (is_inside(in_row(j))) add(sums, phase, ring_ + reading * Rows::kRowBytes + read_);
          finish(sums, phase, j);
          reading = after(reading);
          writing = after(writing);
        }
      }
    }
    cp_async_wait_group<0>();
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
  }
  TRACEA_DEVICE static void clear(Pair (&row)[kTileW]) {
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) row[i] = {0.0f, 0.0f};
  }

  TRACEA_DEVICE int in_row(int j) const { return in_row_ + p_.rows.in_step * j; }
  TRACEA_DEVICE bool is_inside(int row) const { return row >= 0 && row < p_.rows.in; }

  // One group for each row, whether it has copies or not: the waits count groups.
  TRACEA_DEVICE void load(const Rows& source, int j, int stage, int entries) const {
    const int row = in_row(j);
    if (j < entries && is_inside(row)) {
      source.start(shared_address(ring_) + stage * Rows::kRowBytes, row, true);
    }
    cp_async_commit_group();
  }

  // The taps of this block's channels; in reverse for the input's gradient.
  TRACEA_DEVICE void load_weights() {
    const auto* w = static_cast<const Element*>(p_.w);
    if constexpr (Traits::kWeightsInRegisters) {
      TRACEA_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) {
        kept_[tap] = load_pair<true>(w + from(tap) * p_.channels + channel_,
                                     p_.channels - channel_);
      }
    } else {
      for (int i = thread(); i < kTaps * kPairs; i += kThreads) {
        const int tap = i / kPairs, channel = in_channel_ + 2 * (i % kPairs);
        const Pair pair =
            load_pair<true>(w + from(tap) * p_.channels + channel, p_.channels - channel);
        weights_[i] = make_float2(pair.x, pair.y);
      }
    }
    bias_ = {0.0f, 0.0f};
    if constexpr (Traits::kHasBias) {
      bias_ = load_pair<true>(static_cast<const ElementBias*>(p_.bias) + channel_,
                              p_.channels - channel_);
    }
  }
  TRACEA_DEVICE static i64 from(int tap) { return Traits::kFlips ? kTaps - 1 - tap : tap; }

  TRACEA_DEVICE Pair weight(int tap) const {
    if constexpr (Traits::kWeightsInRegisters) {
      return kept_[tap];
    } else {
      const float2 pair = weights_[tap * kPairs + pair_];
      return {pair.x, pair.y};
    }
  }

  // Adds a row of the ring to the sums of all results that it belongs to.
  TRACEA_DEVICE void add(Pair (&sums)[RowTaps::kSlots][kTileW], int phase,
                         const u8* row) const {
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

  // Stores the results that row j of the ring completed.
  TRACEA_DEVICE void finish(Pair (&sums)[RowTaps::kSlots][kTileW], int phase, int j) const {
    TRACEA_UNROLL
    for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
      if (!RowTaps::completes(slot, phase)) continue;
      // The distance to the last tap depends on the phase alone.
      const int result = RowTaps::completed(slot, phase) +
                         (j - phase) * Traits::kBetweenH / Traits::kStrideH;
      const int row = row_ + p_.rows.classes * result;
      if (result >= 0 && result < results_ && row >= 0) store(sums[slot], row);
      clear(sums[slot]);
    }
  }

  TRACEA_DEVICE void store(const Pair (&sums)[kTileW], int row) const {
    const i64 first =
        ((image_ * p_.rows.out + row) * p_.columns.out + column_) * p_.channels + channel_;
    const int step = Traits::kClassesW * p_.channels;
    Pair residual[kTileW];  // all are on their way before the first is needed
    if constexpr (Traits::kHasResidual) {
      const auto* source = static_cast<const ElementResidual*>(p_.residual) + first;
      TRACEA_UNROLL
      for (int i = 0; i < kTileW; ++i) {
        residual[i] = load_pair<true>(source + static_cast<i64>(i) * step, count(i));
      }
    }
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      Pair z{sums[i].x + bias_.x, sums[i].y + bias_.y};
      if constexpr (Traits::kHasResidual) z = join<false>(z, residual[i]);
      const i64 at = first + static_cast<i64>(i) * step;
      if constexpr (Traits::kSavesPreactivation) {
        store_pair<true>(static_cast<ElementOut*>(p_.preactivation) + at, count(i), z);
      }
      const Pair y{activate<Traits::kActivation>(z.x), activate<Traits::kActivation>(z.y)};
      store_pair<true>(static_cast<ElementOut*>(p_.out) + at, count(i), y);
    }
  }

  // Above zero if the thread's channels of column i of its strip exist.
  TRACEA_DEVICE int count(int i) const {
    const int column = column_ + Traits::kClassesW * i;
    return column >= 0 && column < p_.columns.out ? p_.channels - channel_ : 0;
  }

  const DepthwiseParams& p_;
  float2* const weights_;
  u8* const ring_;
  i64 image_;
  int channel_, pair_, column_, row_;      // of the first result
  int in_row_, in_column_, in_channel_;    // of the first entry of the block
  int read_;     // byte of a row in the ring where the thread's window begins
  int results_;  // rows
  Pair bias_;
  Pair kept_[Traits::kWeightsInRegisters ? kTaps : 1];
};

template <class Traits>
TRACEA_DEVICE void conv2d_depthwise(const DepthwiseParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dDepthwise<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
