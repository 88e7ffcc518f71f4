// conv2d_grouped_images_weights: the gradient of the weights of a convolution of small images
// in groups of 16 or 32 channels, as partial sums over the images of a block,
//
//   partial[part, r, s, c, k] = sum over n, p, q of
//       x[n, p * stride + r * dilation - padding, ..(q, s), c of k's group] * dy[n, p, q, k]
//
// NHWC, 16-bit elements, sums f32, on every GPU since sm_80. A block has some channels of some
// whole images of x and of dy in shared memory, see tile/whole_images.cuh, and counts pixels
// through all images, 16 to a step. A warp has 16 channels of x of one group, all channels of
// dy of that group and, in registers, their sums of all taps; kSplits warps share the steps:
//
//   step   ldmatrix.trans of dy: 16 pixels, all k          once
//          ldmatrix.trans of x at tap (r, s): 16 pixels, 16 c
//          mma for each 8 k
//
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/whole_images.cuh"

namespace tracea {

struct GroupedImagesWeightsParams {
  const void* x;
  const void* dy;
  float* partial;  // (parts, R, S, channels of a group, channels)
  int images, channels, channel_blocks;
};

// Traits: Element; Rows and Columns of x as the taps see it, ResultRows and ResultColumns of
// dy, a WholeAxis each; kGroup, kChannels, kImages, kParts, kSplits, kThreads.
template <class Traits>
class Conv2dGroupedImagesWeights {
 public:
  using Element = typename Traits::Element;
  using X = WholeImages<typename Traits::Rows, typename Traits::Columns, Traits::kChannels,
                        Traits::kThreads>;
  using Dy = WholeImages<typename Traits::ResultRows, typename Traits::ResultColumns,
                         Traits::kChannels, Traits::kThreads>;
  static constexpr int kGroup = Traits::kGroup, kSplits = Traits::kSplits;
  static constexpr int kTaps = Traits::Rows::kTaps * Traits::Columns::kTaps;
  static constexpr int kBlocks = kGroup / 8;   // of channels of dy
  static constexpr int kSides = kGroup / 16;   // warps that share a group's channels of x
  static constexpr int kWarps = Traits::kThreads / kWarpSize;
  static constexpr int kSums = kTaps * kBlocks * 4;  // of a thread
  static constexpr int kSumBytes = kWarps / kSplits * (kSplits / 2) * kSums * kWarpSize * 4;
  static constexpr int kImageBytes = Traits::kImages * (X::kImageBytes + Dy::kImageBytes);

  static_assert(kGroup == 16 || kGroup == 32, "warps share a group's channels");
  static_assert(kWarps == Traits::kChannels / 16 * kSplits, "each 16 channels as many warps");
  static_assert(kSplits == 1 || kSplits == 2 || kSplits == 4, "halves add the other half's");
  static_assert((kImageBytes > kSumBytes ? kImageBytes : kSumBytes) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(sizeof(Element) == 2, "fragments are of 16-bit elements");

  TRACEA_DEVICE Conv2dGroupedImagesWeights(const GroupedImagesWeightsParams& params, u8* smem)
      : p_(params),
        smem_(smem),
        part_(static_cast<int>(blockIdx.x) / params.channel_blocks),
        x_{params.x, shared_address(smem), params.images, params.channels, first_image(),
           static_cast<int>(blockIdx.x) % params.channel_blocks * Traits::kChannels},
        dy_{params.dy, x_.smem + Traits::kImages * X::kImageBytes, params.images,
            params.channels, first_image(), x_.first_channel},
        split_(warp() % kSplits),
        channel_(warp() / kSplits * 16) {
    const int left = params.images - first_image();
    pixels_ = (left < Traits::kImages ? left : Traits::kImages) * X::kPixels;
  }

  TRACEA_DEVICE void run() {
    TRACEA_UNROLL
    for (int part = 0; part < Traits::kParts; ++part) {
      const int begin = part > 0 ? end_of_part(part - 1) : 0;
      x_.fetch(begin, end_of_part(part));
      dy_.fetch(begin, end_of_part(part));
      cp_async_commit_group();
    }
    float sums[kTaps][kBlocks][4] = {};
    int step = split_;
    TRACEA_UNROLL
    for (int part = 0; part < Traits::kParts; ++part) {
      wait_for_part<Traits::kParts>(part);
      __syncthreads();
      const int here = end_of_part(part) * X::kPixels;
      const int end = here < pixels_ ? here : pixels_;
      TRACEA_NO_UNROLL
      for (; 16 * step + 16 <= end; step += kSplits) add<false>(sums, step);
    }
    if (16 * step < pixels_) add<true>(sums, step);
    add_up_splits(sums);
    if (split_ == 0) store(sums);
  }

 private:
  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  TRACEA_DEVICE static int warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  }
  TRACEA_DEVICE int first_image() const { return part_ * Traits::kImages; }
  TRACEA_DEVICE static constexpr int end_of_part(int part) {
    return tracea::end_of_part<Traits::kImages, Traits::kParts>(part);
  }
  // The group's first channel, in the block.
  TRACEA_DEVICE int group() const { return channel_ / kGroup * kGroup; }

  // Adds 16 pixels to the sums; kIsLast: some of them do not exist.
  template <bool kIsLast>
  TRACEA_DEVICE void add(float (&sums)[kTaps][kBlocks][4], int step) const {
    const int low = lane() % 8, odd = lane() / 8 % 2 * 8, high = lane() / 16 * 8;
    const u32 in_dy = dy_.window(existing(16 * step + odd + low));
    const u32 in_x = x_.window(existing(16 * step + high + low));
    u32 dy[kBlocks][2];
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; block += 2) {
      u32 words[4];
      ldmatrix_x4_trans(words, in_dy + 2 * (group() + 8 * block + high));
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        dy[block + i / 2][i % 2] = kIsLast ? words[i] & mask(step, i % 2) : words[i];
      }
    }
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      u32 x[4];
      ldmatrix_x4_trans(x, in_x + 2 * (channel_ + odd) + X::offset(tap));
      if constexpr (kIsLast) {
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) x[i] &= mask(step, i / 2);
      }
      TRACEA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        Mma<Element>::mma(sums[tap][block], x, dy[block][0], dy[block][1]);
      }
    }
  }
  TRACEA_DEVICE u32 existing(int pixel) const { return pixel < pixels_ ? pixel : pixels_ - 1; }
  // Of a lane's two pixels in the first or second eight of a step: those that exist.
  TRACEA_DEVICE u32 mask(int step, int half) const {
    const int left = pixels_ - (16 * step + 8 * half + 2 * (lane() % 4));
    return left >= 2 ? 0xFFFFFFFFu : left == 1 ? 0x0000FFFFu : 0u;
  }

  // The sums of all warps that share steps, in the first of them.
  TRACEA_DEVICE void add_up_splits(float (&sums)[kTaps][kBlocks][4]) const {
    TRACEA_UNROLL
    for (int half = kSplits / 2; half > 0; half /= 2) {
      __syncthreads();  // images, or sums of before, have been read
      auto* of_warp = reinterpret_cast<float*>(smem_) +
                      (warp() / kSplits * (kSplits / 2) + split_ % half) * kSums * kWarpSize +
                      lane();
      const bool gives = split_ >= half && split_ < 2 * half;
      if (gives) {
        TRACEA_UNROLL
        for (int i = 0; i < kSums; ++i) {
          of_warp[i * kWarpSize] = sums[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4];
        }
      }
      __syncthreads();
      if (split_ < half) {
        TRACEA_UNROLL
        for (int i = 0; i < kSums; ++i) {
          sums[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] += of_warp[i * kWarpSize];
        }
      }
    }
  }

  TRACEA_DEVICE void store(const float (&sums)[kTaps][kBlocks][4]) const {
    const int channel = x_.first_channel + group() + mma_c_col(lane(), 0);
    if (channel >= p_.channels) return;
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int in_group = channel_ % kGroup + mma_c_row(lane(), 2 * half);
        float* to = p_.partial +
                    ((static_cast<i64>(part_) * kTaps + tap) * kGroup + in_group) * p_.channels +
                    channel;
        TRACEA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          const float(&sum)[4] = sums[tap][block];
          *reinterpret_cast<float2*>(to + 8 * block) =
              make_float2(sum[2 * half], sum[2 * half + 1]);
        }
      }
    }
  }

  const GroupedImagesWeightsParams& p_;
  u8* const smem_;
  const int part_;
  const X x_;
  const Dy dy_;
  const int split_;    // of the steps
  const int channel_;  // the warp's first of x, in the block
  int pixels_;         // of the block's images
};

template <class Traits>
TRACEA_DEVICE void conv2d_grouped_images_weights(const GroupedImagesWeightsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dGroupedImagesWeights<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
