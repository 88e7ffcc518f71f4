// conv2d_grouped: a convolution whose groups have few channels, as many of them in as out,
//
//   y[n, p, q, k] = activation(sum over r, s and the channels c of k's group of
//       x[n, p * stride + r * dilation - padding, ..(q, s), c] * w[r, s, c, k] + bias + residual)
//
// and the gradient of x without steps, the same with the taps in reverse and the weights
// transposed. Images are NHWC, 16-bit elements, sums f32, on every GPU since sm_80.
//
// A block walks down an image, see tile/row_walk.cuh. A warp has 16 channels of the result and
// kTileW columns of it, and multiplies (16 columns, 16 channels of x) by (16 channels of x, 16
// of y). Groups of 8 are the two blocks along the diagonal of that, and only these are
// multiplied; smaller ones are blocks along their diagonals, zeros elsewhere. The weights of
// all taps stay in registers, where those of larger groups come by shared memory, and so do
// the sums of the rows that are not complete:
//
//   row of x in shared memory    [ 16 columns + taps ] x channels
//                                  ldmatrix at tap s: 16 columns, 16 channels
//                                  mma for each row of taps and each 8 channels of y
//
// Assumes channels in multiples of 16, and that no image has 2^31 elements or more.
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_k8.cuh"
#include "ptx/sync.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/pixel_epilogue.cuh"
#include "tile/row_walk.cuh"

namespace tracea {

template <class Traits>
class Conv2dGrouped {
 public:
  using Walk = RowWalk<Traits>;
  using Element = typename Traits::Element;
  using RowTaps = typename Walk::RowTaps;

  static constexpr int kBlocks = Traits::kTileW / 16;  // of columns
  static constexpr int kSide = 16;                     // channels of a warp's result
  static constexpr int kDepth = Traits::kGroup > kSide ? Traits::kGroup / kSide : 1;
  static constexpr int kChannelWarps = Traits::kChannels / kSide;
  static constexpr int kThreads = kChannelWarps * Traits::kStrips * kWarpSize;
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  // Of larger groups, fragments of weights are whole squares: (tap, row of a group, channel).
  static constexpr bool kStagesWeights = Traits::kGroup >= kSide;
  static constexpr int kWeightPitch = Traits::kChannels * 2 + 16;
  static constexpr int kWeightBytes = kStagesWeights ? kTaps * Traits::kGroup * kWeightPitch : 0;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the strips");
  static_assert(kWeightBytes + Walk::kRingBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kTileW % 16 == 0 && Traits::kChannels % (kSide * kDepth) == 0,
                "a warp has whole fragments, a block whole groups");
  static_assert(Traits::kGroup % kSide == 0 || kSide % Traits::kGroup == 0,
                "groups begin where fragments do");
  static_assert(Traits::kBetweenH == 1 && Traits::kBetweenW == 1 && sizeof(Element) == 2,
                "fragments are neighbouring columns of 16-bit elements");

  TRACEA_DEVICE Conv2dGrouped(const RowWalkParams& params, u8* smem)
      : p_(params),
        smem_weights_(smem),
        walk_(params, smem + kWeightBytes),
        channel_(walk_.channel + warp() % kChannelWarps * kSide),
        column_(walk_.column(warp() / kChannelWarps)),
        window_(walk_.window(warp() / kChannelWarps) + lane_bytes()) {}

  TRACEA_DEVICE void run() {
    if (walk_.results <= 0) return;
    float sums[RowTaps::kSlots][kBlocks][2][4] = {};
    walk_.run([&] { load_weights(); },
              [&](int phase, const u8* row) { add(sums, phase, shared_address(row) + window_); },
              [&](int slot, int result, bool exists) {
                if (exists) store(sums[slot], result);
                clear(sums[slot]);
              });
  }

 private:
  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  TRACEA_DEVICE static int warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  }
  TRACEA_DEVICE static void clear(float (&row)[kBlocks][2][4]) {
    TRACEA_UNROLL
    for (auto& block : row) {
      TRACEA_UNROLL
      for (auto& half : block) {
        TRACEA_UNROLL
        for (float& sum : half) sum = 0.0f;
      }
    }
  }

  // Where this lane points ldmatrix: column l % 16, and the second 8 channels from lane 16 on,
  // of the channels of x that the warp begins with.
  TRACEA_DEVICE int lane_bytes() const {
    const int in_channel = warp() % kChannelWarps / kDepth * kDepth * kSide;
    return lane() % 16 * Traits::kStrideW * Traits::kStepW * Traits::kPitchBytes +
           2 * in_channel + lane() / 16 * 16;
  }

  // Fragments of the weights of every tap, channel of x by channel of the result, and bias.
  TRACEA_DEVICE void load_weights() {
    if constexpr (kStagesWeights) {
      copy_weights();
      __syncthreads();
      read_weights();
    } else {
      gather_weights();
    }
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      bias_[half] = load_bias<Traits>(p_, channel_ + 8 * half + mma_c_col(lane(), 0));
    }
  }

  // The weights of the block's channels to shared memory, 16 bytes at a time.
  TRACEA_DEVICE void copy_weights() const {
    constexpr int kUnits = Traits::kChannels / 8;  // of a row
    constexpr int kAll = kTaps * Traits::kGroup * kUnits;
    TRACEA_UNROLL
    for (int i = 0; i < ceil_div(kAll, kThreads); ++i) {
      const int unit = static_cast<int>(threadIdx.x) + i * kThreads;
      if (unit >= kAll) break;
      const int row = unit / kUnits, column = unit % kUnits * 8;
      const int channel = walk_.channel + column;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (channel < p_.channels) {
        const u16* w = static_cast<const u16*>(p_.w);
        eight = *reinterpret_cast<const uint4*>(w + static_cast<i64>(row) * p_.channels +
                                                channel);
      }
      *reinterpret_cast<uint4*>(smem_weights_ + row * kWeightPitch + column * 2) = eight;
    }
  }

  // The warp's fragments. Rows in shared memory are channels of x, or in reverse those of the
  // result, which are then the columns of the fragments.
  TRACEA_DEVICE void read_weights() {
    constexpr int kGroup = Traits::kGroup;
    const int first = channel_ / (kSide * kDepth) * (kSide * kDepth) - walk_.channel;
    const int own = channel_ - walk_.channel;
    const int low = lane() % 8, odd = lane() / 8 % 2 * 8, high = lane() / 16 * 8;
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      const int from = Traits::kFlips ? kTaps - 1 - tap : tap;
      TRACEA_UNROLL
      for (int depth = 0; depth < kDepth; ++depth) {
        const int row = Traits::kFlips ? own % kGroup + high + low : depth * kSide + odd + low;
        const int column = Traits::kFlips ? first + depth * kSide + odd : own + high;
        const u32 at = shared_address(smem_weights_) +
                       (from * kGroup + row) * kWeightPitch + column * 2;
        u32 words[4];
        if constexpr (Traits::kFlips) {
          ldmatrix_x4(words, at);
        } else {
          ldmatrix_x4_trans(words, at);
        }
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) weights_[tap][depth][i / 2][i % 2] = words[i];
      }
    }
  }

  // The fragments of small groups, with zeros where channels are of different groups.
  TRACEA_DEVICE void gather_weights() {
    constexpr int kGroup = Traits::kGroup;
    const int first = channel_ / (kSide * kDepth) * (kSide * kDepth);
    int offsets[kDepth][2][4];  // of the elements of a lane, in the weights of a tap
    u32 masks[kDepth][2][4];
    TRACEA_UNROLL
    for (int i = 0; i < kDepth * 8; ++i) {
      const int depth = i / 8, half = i / 4 % 2, element = i % 4;
      const int in = first + depth * kSide + mma_b_row(lane(), element);
      const int out = channel_ + 8 * half + mma_b_col(lane(), 0);
      const int row = Traits::kFlips ? out : in, column = Traits::kFlips ? in : out;
      const bool meets = in / kGroup == out / kGroup && in < p_.channels && out < p_.channels;
      masks[depth][half][element] = meets ? 0xFFFFu : 0u;
      offsets[depth][half][element] = meets ? row % kGroup * p_.channels + column : 0;
    }
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      const int from = Traits::kFlips ? kTaps - 1 - tap : tap;
      const u16* w = static_cast<const u16*>(p_.w) + from * kGroup * p_.channels;
      TRACEA_UNROLL
      for (int i = 0; i < kDepth * 4; ++i) {
        const int depth = i / 4, half = i / 2 % 2, word = i % 2;
        const int(&at)[4] = offsets[depth][half];
        const u32(&mask)[4] = masks[depth][half];
        if constexpr (Traits::kFlips) {  // neighbours in memory
          const u32 pair = *reinterpret_cast<const u32*>(w + at[2 * word]);
          weights_[tap][depth][half][word] =
              pair & (mask[2 * word] | mask[2 * word + 1] << 16);
        } else {
          weights_[tap][depth][half][word] =
              (w[at[2 * word]] & mask[2 * word]) |
              (w[at[2 * word + 1]] & mask[2 * word + 1]) << 16;
        }
      }
      // A line of taps at a time: the loads of all of them would fill the registers.
      if (tap % Traits::kTapsW == Traits::kTapsW - 1) asm volatile("" ::: "memory");
    }
  }

  // Adds a row of the ring to the sums of all results that it belongs to.
  TRACEA_DEVICE void add(float (&sums)[RowTaps::kSlots][kBlocks][2][4], int phase,
                         u32 row) const {
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      TRACEA_UNROLL
      for (int s = 0; s < Traits::kTapsW; ++s) {
        TRACEA_UNROLL
        for (int depth = 0; depth < kDepth; ++depth) {
          u32 x[4];
          const int column = (16 * block * Traits::kStrideW + s) * Traits::kStepW;
          ldmatrix_x4(x, row + column * Traits::kPitchBytes + depth * 2 * kSide);
          TRACEA_UNROLL
          for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
            const int r = RowTaps::tap(slot, phase);
            if (r >= Traits::kTapsH) continue;
            TRACEA_UNROLL
            for (int half = 0; half < 2; ++half) {
              const u32(&w)[2] = weights_[r * Traits::kTapsW + s][depth][half];
              if constexpr (Traits::kGroup <= 8) {
                mma_k8(sums[slot][block][half], x[2 * half], x[2 * half + 1], w[half],
                       Element{});
              } else {
                Mma<Element>::mma(sums[slot][block][half], x, w[0], w[1]);
              }
            }
          }
        }
      }
    }
  }

  TRACEA_DEVICE void store(const float (&sums)[kBlocks][2][4], int result) const {
    const int channel = channel_ + mma_c_col(lane(), 0);
    const i64 line = walk_.line(result);
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      TRACEA_UNROLL
      for (int row = 0; row < 2; ++row) {
        const int column =
            column_ + Traits::kClassesW * (16 * block + mma_c_row(lane(), 2 * row));
        const bool exists = column >= 0 && column < p_.columns.out;
        const i64 at = (line + column) * p_.channels + channel;
        Pair residual[2];
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          residual[half] = load_residual<Traits>(p_, at + 8 * half, count(exists, half));
        }
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const Pair sum{sums[block][half][2 * row], sums[block][half][2 * row + 1]};
          store_pixel<Traits>(p_, at + 8 * half, count(exists, half), sum, bias_[half],
                              residual[half]);
        }
      }
    }
  }
  TRACEA_DEVICE int count(bool exists, int half) const {
    return exists ? p_.channels - channel_ - 8 * half : 0;
  }

  const RowWalkParams& p_;
  u8* const smem_weights_;
  const Walk walk_;
  const int channel_, column_;
  const int window_;  // byte of a row in the ring
  u32 weights_[kTaps][kDepth][2][2];
  Pair bias_[2];
};

template <class Traits>
TRACEA_DEVICE void conv2d_grouped(const RowWalkParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dGrouped<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
