// conv2d_grouped_images: a convolution of small images in groups of 16 or 32 channels, as many
// of them out as in,
//
//   y[n, p, q, k] = activation(sum over r, s and the channels c of k's group of
//       x[n, p * stride + r * dilation - padding, ..(q, s), c] * w[r, s, c, k] + bias + residual)
//
// and the gradient of x without steps, the same with the taps in reverse and the weights
// transposed. Images are NHWC, 16-bit elements, sums f32, on every GPU since sm_80.
//
// A block has some channels of some whole images in shared memory, with zeros around them, so
// that a tap is an offset, and its pixels are counted through all images: a fragment of 16
// pixels may end in the next row or image, and none is empty. A warp has one group and, in
// registers, its weights of all taps:
//
//   tile of 16 pixels   ldmatrix at tap (r, s): 16 pixels, 16 channels of x
//                       mma for each 8 channels of y
//
// Channels of the result are dealt to the fragments' columns so that a thread's are neighbours.
// Images arrive in kParts parts; tiles begin when theirs have.
//
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/element_run.cuh"
#include "tile/fragment.cuh"
#include "tile/whole_images.cuh"

namespace tracea {

struct GroupedImagesParams {
  const void* x;         // what is read: x, or dy
  const void* w;         // (R, S, channels of a group, channels)
  const void* bias;      // (channels), or null
  const void* residual;  // of the result's shape, or null
  void* out;
  void* preactivation;  // null unless it is saved
  int images, channels, channel_blocks;
};

// Traits: Element; Rows and Columns, a WholeAxis each; kGroup, kChannels, kImages, kParts,
// kTiles, kThreads, kFlips; those of the epilogue.
template <class Traits>
class Conv2dGroupedImages {
 public:
  using Element = typename Traits::Element;
  using Images = WholeImages<typename Traits::Rows, typename Traits::Columns,
                             Traits::kChannels, Traits::kThreads>;
  static constexpr int kGroup = Traits::kGroup, kChannels = Traits::kChannels;
  static constexpr int kTiles = Traits::kTiles;        // of 16 pixels at a time
  static constexpr int kDepth = kGroup / 16;           // fragments of a group's channels
  static constexpr int kBlocks = kGroup / 8;           // of a group's results
  static constexpr int kRun = kGroup / 4;              // neighbouring results of a thread
  static constexpr int kTaps = Traits::Rows::kTaps * Traits::Columns::kTaps;
  static constexpr int kPitchBytes = Images::kPitchBytes;  // also of a row of weights
  static constexpr int kWeightRows = kTaps * kGroup;
  static constexpr int kWeightBytes = kWeightRows * kPitchBytes;
  static constexpr int kChannelWarps = kChannels / kGroup;
  static constexpr int kPixelWarps = Traits::kThreads / kWarpSize / kChannelWarps;
  static constexpr int kUnits = Images::kUnits;  // of a row of weights

  static_assert(kGroup == 16 || kGroup == 32, "a warp has a group");
  static_assert(kChannels % kGroup == 0 && Traits::kThreads % (kChannelWarps * kWarpSize) == 0,
                "groups have as many warps each");
  static_assert(kWeightBytes + Traits::kImages * Images::kImageBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(sizeof(Element) == 2, "fragments are of 16-bit elements");

  TRACEA_DEVICE Conv2dGroupedImages(const GroupedImagesParams& params, u8* smem)
      : p_(params),
        weights_smem_(smem),
        x_{params.x,
           shared_address(smem) + kWeightBytes,
           params.images,
           params.channels,
           static_cast<int>(blockIdx.x) / params.channel_blocks * Traits::kImages,
           static_cast<int>(blockIdx.x) % params.channel_blocks * kChannels},
        group_(warp() % kChannelWarps * kGroup) {
    const int left = params.images - x_.first_image;
    pixels_ = (left < Traits::kImages ? left : Traits::kImages) * Images::kPixels;
  }

  TRACEA_DEVICE void run() {
    TRACEA_UNROLL
    for (int part = 0; part < Traits::kParts; ++part) {
      x_.fetch(part > 0 ? end_of_part(part - 1) : 0, end_of_part(part));
      cp_async_commit_group();
    }
    stage_weights();
    __syncthreads();
    read_weights();
    const auto bias = load_bias();
    int tile = warp() / kChannelWarps * kTiles;
    TRACEA_UNROLL
    for (int part = 0; part < Traits::kParts; ++part) {
      wait_for_part<Traits::kParts>(part);
      __syncthreads();
      const int here = end_of_part(part) * Images::kPixels;
      const int end = here < pixels_ ? here : pixels_;
      TRACEA_NO_UNROLL
      for (; last_pixel(tile) < end; tile += kPixelWarps * kTiles) multiply(tile, bias);
    }
  }

 private:
  using Bias = Run<float, kRun>;

  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  TRACEA_DEVICE static int warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  }
  TRACEA_DEVICE static constexpr int end_of_part(int part) {
    return tracea::end_of_part<Traits::kImages, Traits::kParts>(part);
  }
  // The last pixel that a tile needs; tiles that end beyond the last one repeat it.
  TRACEA_DEVICE int last_pixel(int tile) const {
    const int last = 16 * (tile + kTiles) - 1;
    return 16 * tile < pixels_ && last >= pixels_ ? pixels_ - 1 : last;
  }
  // Which of a group's channels is column `column` of block `block` of the result.
  TRACEA_HOST_DEVICE static constexpr int channel_of(int block, int column) {
    return kRun * (column / 2) + 2 * block + column % 2;
  }

  // The weights of the block's groups, to shared memory. Forward, a row has the results of
  // each group as the fragments' columns have them.
  TRACEA_DEVICE void stage_weights() const {
    constexpr int kAll = kWeightRows * kUnits;
    constexpr int kCopies = ceil_div(kAll, Traits::kThreads);
    constexpr int kAtOnce = kCopies < 9 ? kCopies : 9;
    TRACEA_NO_UNROLL
    for (int first = 0; first < kCopies; first += kAtOnce) {
      Words eight[kAtOnce];
      TRACEA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = static_cast<int>(threadIdx.x) + (first + i) * Traits::kThreads;
        const int row = unit / kUnits, channel = x_.first_channel + unit % kUnits * 8;
        const auto* from = static_cast<const Element*>(p_.w) +
                           static_cast<i64>(row) * p_.channels + channel;
        eight[i] = unit < kAll && channel < p_.channels ? *reinterpret_cast<const Words*>(from)
                                                        : Words{};
      }
      TRACEA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = static_cast<int>(threadIdx.x) + (first + i) * Traits::kThreads;
        if (unit < kAll) put_weights(unit / kUnits, unit % kUnits * 8, eight[i]);
      }
    }
  }
  TRACEA_DEVICE void put_weights(int row, int channel, const Words& eight) const {
    if constexpr (Traits::kFlips) {
      *reinterpret_cast<Words*>(weights_smem_ + row * kPitchBytes + 2 * channel) = eight;
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int of_group = channel % kGroup + 2 * i;
        const int block = of_group % kRun / 2, column = of_group / kRun * 2;
        const int at = channel / kGroup * kGroup + 8 * block + column;
        *reinterpret_cast<u32*>(weights_smem_ + row * kPitchBytes + 2 * at) = eight.w[i];
      }
    }
  }

  // The warp's fragments of all taps.
  TRACEA_DEVICE void read_weights() {
    const int low = lane() % 8, odd = lane() / 8 % 2 * 8, high = lane() / 16;
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      const u32 rows = shared_address(weights_smem_) +
                       (Traits::kFlips ? kTaps - 1 - tap : tap) * kGroup * kPitchBytes +
                       2 * group_;
      TRACEA_UNROLL
      for (int i = 0; i < kDepth * kBlocks / 2; ++i) {
        const int depth = i % kDepth, block = i / kDepth * 2;
        u32 words[4];
        if constexpr (Traits::kFlips) {
          const int row = channel_of(block + high, low), column = 16 * depth + odd;
          ldmatrix_x4(words, rows + row * kPitchBytes + 2 * column);
        } else {
          const int row = 16 * depth + odd + low, column = 8 * (block + high);
          ldmatrix_x4_trans(words, rows + row * kPitchBytes + 2 * column);
        }
        TRACEA_UNROLL
        for (int j = 0; j < 4; ++j) weights_[tap][depth][block + j / 2][j % 2] = words[j];
      }
    }
  }

  TRACEA_DEVICE int channel() const {  // the thread's first result
    return x_.first_channel + group_ + lane() % 4 * kRun;
  }
  TRACEA_DEVICE Bias load_bias() const {
    Bias bias = {};
    if constexpr (Traits::kHasBias) {
      using ElementBias = typename Traits::ElementBias;
      if (channel() < p_.channels) {
        const auto run =
            Run<ElementBias, kRun>::load(static_cast<const ElementBias*>(p_.bias) + channel());
        TRACEA_UNROLL
        for (int i = 0; i < kRun; ++i) bias.x[i] = run.x[i];
      }
    }
    return bias;
  }

  // Where this lane points ldmatrix for its pixel of a tile, at tap (0, 0).
  TRACEA_DEVICE u32 window(int tile) const {
    const int at = 16 * tile + lane() % 16;
    return x_.window(at < pixels_ ? at : pixels_ - 1) + 2 * group_ + lane() / 16 * 16;
  }

  TRACEA_DEVICE void multiply(int first, const Bias& bias) const {
    float sums[kTiles][kBlocks][4] = {};
    u32 windows[kTiles];
    TRACEA_UNROLL
    for (int t = 0; t < kTiles; ++t) windows[t] = window(first + t);
    TRACEA_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      TRACEA_UNROLL
      for (int depth = 0; depth < kDepth; ++depth) {
        TRACEA_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          u32 x[4];
          ldmatrix_x4(x, windows[t] + Images::offset(tap) + 32 * depth);
          TRACEA_UNROLL
          for (int block = 0; block < kBlocks; ++block) {
            const u32(&w)[2] = weights_[tap][depth][block];
            Mma<Element>::mma(sums[t][block], x, w[0], w[1]);
          }
        }
      }
    }
    TRACEA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int pixel = 16 * (first + t) + mma_c_row(lane(), 2 * half);
        if (pixel < pixels_ && channel() < p_.channels) store(sums[t], half, pixel, bias);
      }
    }
  }

  // z = sum + bias + residual, y = activation(z) of a run of channels of a pixel.
  TRACEA_DEVICE void store(const float (&sums)[kBlocks][4], int half, int pixel,
                           const Bias& bias) const {
    using ElementOut = typename Traits::ElementOut;
    using ElementResidual = typename Traits::ElementResidual;
    const i64 at =
        (static_cast<i64>(x_.first_image) * Images::kPixels + pixel) * p_.channels + channel();
    Run<ElementOut, kRun> z;
    TRACEA_UNROLL
    for (int i = 0; i < kRun; ++i) z.x[i] = sums[i / 2][2 * half + i % 2] + bias.x[i];
    if constexpr (Traits::kHasResidual) {
      const auto more = Run<ElementResidual, kRun>::load(
          static_cast<const ElementResidual*>(p_.residual) + at);
      TRACEA_UNROLL
      for (int i = 0; i < kRun; ++i) z.x[i] += more.x[i];
    }
    if constexpr (Traits::kSavesPreactivation) {
      z.store(static_cast<ElementOut*>(p_.preactivation) + at);
    }
    TRACEA_UNROLL
    for (int i = 0; i < kRun; ++i) z.x[i] = activate<Traits::kActivation>(z.x[i]);
    z.store(static_cast<ElementOut*>(p_.out) + at);
  }

  const GroupedImagesParams& p_;
  u8* const weights_smem_;
  const Images x_;
  const int group_;  // the warp's first channel, in the block
  int pixels_;       // of the block's images
  u32 weights_[kTaps][kDepth][kBlocks][2];
};

template <class Traits>
TRACEA_DEVICE void conv2d_grouped_images(const GroupedImagesParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dGroupedImages<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
