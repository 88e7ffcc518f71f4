// conv2d_stem_weights: the gradient of the weights of a convolution of few channels, such as
// the first one of a network, on every GPU since sm_80,
//
//   dw[r, s, c, k] = sum over n, p, q of x[n, p * stride + r - padding, ..(q, s), c]
//                                     * dy[n, p, q, k]
//
// as partial sums in f32, (parts * splits, R, S, C, K). They are summed in a second step,
// always in the same order.
//
// Pixels of x are widened to kPixel channels in shared memory, so that from one column of y to
// the next it is a multiple of 16 bytes, and what a column of y sees of a row, S * kPixel
// neighbouring elements, is a row of a matrix that ldmatrix reads where it lies:
//
//   row of x    |c c c 0|c c c 0|c c c 0|c c c 0|c c c 0|..     kPixel 4, stride 2
//   q = 0        ------------------------- S taps
//   q = 1                        -------------------------
//
// A block walks down the rows of y, a part of all images', and has 64 channels of dy. Each
// warp has a row of taps, or every so-manieth 16 columns of y for it, and multiplies
// (S * kPixel, 16 columns) by (16 columns, 64). Rows of x stay in a ring until no tap needs
// them; while one row of y is multiplied, the next ones of x pass through registers, and
// that of dy is copied.
//
// Assumes columns of y in multiples of 16, and at least as many rows of taps as a stride.
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"

namespace tracea {

struct StemWeightsParams {
  const void* x;
  const void* dy;
  float* partial;
  int height, out_height, out_channels;
  int first_row, first_column;  // of x, that the first tap of y's first pixel sees
  int rows, parts, channel_tiles;  // rows of y in all images
};

template <class Traits>
class StemWeights {
 public:
  using Element = typename Traits::Element;

  static constexpr int kTapsH = Traits::kTapsH, kTapsW = Traits::kTapsW;
  static constexpr int kPixel = Traits::kPixel;  // channels in shared memory
  static constexpr int kThreads = kTapsH * Traits::kSplits * kWarpSize;
  static constexpr int kBlocks = ceil_div(kTapsW * kPixel, 16);  // of 16 rows of the product
  static constexpr int kSteps = Traits::kOutWidth / 16;
  static constexpr int kStepBytes = Traits::kStrideW * kPixel * 2;  // from column to column
  static constexpr int kRowPixels =
      round_up((Traits::kOutWidth - 1) * Traits::kStrideW + kBlocks * 16 / kPixel, 2);
  static constexpr int kRowBytes = kRowPixels * kPixel * 2;
  static constexpr int kRing = kTapsH + Traits::kStrideH;  // rows of x
  static constexpr int kTileK = 64;
  static constexpr int kPitch = kTileK * 2 + 16;  // rows of 8 columns lie in different banks
  static constexpr int kBytesDy = Traits::kOutWidth * kPitch;
  static constexpr int kPrefetched = Traits::kStrideH * Traits::kWidth;  // pixels of x
  static constexpr int kPixels = ceil_div(kPrefetched, kThreads);

  static_assert(kThreads == Traits::kThreads, "the launch must have a warp a row of taps");
  static_assert(kRing * kRowBytes + 2 * kBytesDy == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kStepBytes % 16 == 0 && kRowBytes % 16 == 0, "ldmatrix reads whole units");
  static_assert(Traits::kOutWidth % 16 == 0, "a step is 16 columns of y");
  static_assert(kTapsH >= Traits::kStrideH, "rows between those of taps are not skipped");
  static_assert(Traits::kChannels <= kPixel && (kPixel == 4 || kPixel == 8),
                "a pixel is one store");

  TRACEA_DEVICE StemWeights(const StemWeightsParams& params, u8* smem)
      : p_(params), ring_(smem), dy_(shared_address(smem + kRing * kRowBytes)) {
    const int block = static_cast<int>(blockIdx.x);
    channel_ = block % p_.channel_tiles * kTileK;
    part_ = block / p_.channel_tiles;
    first_ = static_cast<int>(static_cast<i64>(p_.rows) * part_ / p_.parts);
    last_ = static_cast<int>(static_cast<i64>(p_.rows) * (part_ + 1) / p_.parts);
  }

  TRACEA_DEVICE void run() {
    for (int i = thread(); i < kRing * kRowBytes / 16; i += kThreads) {
      reinterpret_cast<Words*>(ring_)[i] = Words{};
    }
    __syncthreads();
    float sums[kBlocks][kTileK / 8][4] = {};
    if (first_ < last_) {
      copy_dy(first_);
      load_image(first_);
    }
    TRACEA_NO_UNROLL
    for (int row = first_; row < last_; ++row) {
      cp_async_wait_group<0>();
      __syncthreads();
      const bool is_last = row + 1 == last_;
      const bool starts = !is_last && (row + 1) % p_.out_height == 0;  // an image
      if (!is_last) copy_dy(row + 1);
      u16 pixels[kPixels][Traits::kChannels];
      if (!is_last && !starts) load(pixels, row + 1);
      multiply(sums, row);
      if (starts) {
        __syncthreads();
        load_image(row + 1);
      } else if (!is_last) {
        store(pixels, row + 1);
      }
    }
    write(sums);
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int lane() { return thread() % kWarpSize; }
  TRACEA_DEVICE static int warp() { return warp_uniform(thread() / kWarpSize); }

  // The row of x that the first row of taps sees; in its image, or outside.
  TRACEA_DEVICE int x_row(int row) const {
    return row % p_.out_height * Traits::kStrideH + p_.first_row;
  }
  TRACEA_DEVICE bool is_inside(int x_row) const { return x_row >= 0 && x_row < p_.height; }
  TRACEA_DEVICE u8* slot(int x_row) const {
    return ring_ + static_cast<u32>(x_row - p_.first_row) % kRing * kRowBytes;
  }

  TRACEA_DEVICE void copy_dy(int row) const {
    const u8* source = static_cast<const u8*>(p_.dy) +
                       (static_cast<i64>(row) * Traits::kOutWidth * p_.out_channels +
                        channel_) * 2;
    const u32 target = dy_ + (row & 1) * kBytesDy;
    for (int i = thread(); i < Traits::kOutWidth * (kTileK / 8); i += kThreads) {
      const int column = i / (kTileK / 8), unit = i % (kTileK / 8);
      const bool inside = channel_ + 8 * unit < p_.out_channels;
      const u8* at = source + (static_cast<i64>(column) * p_.out_channels + 8 * unit) * 2;
      cp_async_or_zero<16>(target + column * kPitch + 16 * unit, inside ? at : source, inside);
    }
    cp_async_commit_group();
  }

  TRACEA_DEVICE const u16* pixel(int row, int x_row, int column) const {
    const i64 line = static_cast<i64>(row / p_.out_height) * p_.height + x_row;
    return static_cast<const u16*>(p_.x) +
           (line * Traits::kWidth + column) * Traits::kChannels;
  }

  // All rows of x that a row of y sees, of which none is in the ring.
  TRACEA_DEVICE void load_image(int row) const {
    const int top = x_row(row);
    for (int i = thread(); i < kTapsH * Traits::kWidth; i += kThreads) {
      const int at = top + i / Traits::kWidth, column = i % Traits::kWidth;
      if (!is_inside(at)) continue;
      u16 channels[Traits::kChannels];
      load_pixel(channels, pixel(row, at, column));
      store_pixel(channels, at, column);
    }
  }

  // Of the rows of x that a row of y sees, those that the row before does not see.
  TRACEA_DEVICE void load(u16 (&pixels)[kPixels][Traits::kChannels], int row) const {
    const int top = x_row(row) + kTapsH - Traits::kStrideH;
    TRACEA_UNROLL
    for (int i = 0; i < kPixels; ++i) {
      const int index = thread() + i * kThreads;
      const int at = top + index / Traits::kWidth;
      if (index < kPrefetched && is_inside(at)) {
        load_pixel(pixels[i], pixel(row, at, index % Traits::kWidth));
      }
    }
  }
  TRACEA_DEVICE void store(const u16 (&pixels)[kPixels][Traits::kChannels], int row) const {
    const int top = x_row(row) + kTapsH - Traits::kStrideH;
    TRACEA_UNROLL
    for (int i = 0; i < kPixels; ++i) {
      const int index = thread() + i * kThreads;
      const int at = top + index / Traits::kWidth;
      if (index < kPrefetched && is_inside(at)) {
        store_pixel(pixels[i], at, index % Traits::kWidth);
      }
    }
  }

  TRACEA_DEVICE static void load_pixel(u16 (&channels)[Traits::kChannels], const u16* from) {
    TRACEA_UNROLL
    for (int c = 0; c < Traits::kChannels; ++c) channels[c] = from[c];
  }
  TRACEA_DEVICE void store_pixel(const u16 (&channels)[Traits::kChannels], int x_row,
                                 int column) const {
    column -= p_.first_column;
    if (column < 0 || column >= kRowPixels) return;
    u32 words[kPixel / 2] = {};
    TRACEA_UNROLL
    for (int c = 0; c < Traits::kChannels; ++c) {
      words[c / 2] |= static_cast<u32>(channels[c]) << c % 2 * 16;
    }
    u8* at = slot(x_row) + column * kPixel * 2;
    if constexpr (kPixel == 4) {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  TRACEA_DEVICE void multiply(float (&sums)[kBlocks][kTileK / 8][4], int row) const {
    const int r = warp() % kTapsH, at = x_row(row) + r;
    if (!is_inside(at)) return;
    // Lanes of ldmatrix: matrices by row (k is the column of y), then by 8 elements, for x; the
    // other way round for dy.
    const u32 x = shared_address(slot(at)) + (lane() / 16 * 8 + lane() % 8) * kStepBytes +
                  lane() / 8 % 2 * 16;
    const u32 dy = dy_ + (row & 1) * kBytesDy +
                   (lane() / 8 % 2 * 8 + lane() % 8) * kPitch + lane() / 16 * 16;
    TRACEA_NO_UNROLL
    for (int step = warp() / kTapsH; step < kSteps; step += Traits::kSplits) {
      u32 a[kBlocks][4], b[kTileK / 16][4];
      TRACEA_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        ldmatrix_x4_trans(a[i], x + step * 16 * kStepBytes + i * 32);
      }
      TRACEA_UNROLL
      for (int j = 0; j < kTileK / 16; ++j) {
        ldmatrix_x4_trans(b[j], dy + step * 16 * kPitch + j * 32);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        TRACEA_UNROLL
        for (int j = 0; j < kTileK / 8; ++j) {
          const u32* pair = b[j / 2] + 2 * (j % 2);
          Mma<Element>::mma(sums[i][j], a[i], pair[0], pair[1]);
        }
      }
    }
  }

  TRACEA_DEVICE void write(const float (&sums)[kBlocks][kTileK / 8][4]) const {
    const int r = warp() % kTapsH, split = warp() / kTapsH;
    const i64 taps = (static_cast<i64>(part_) * Traits::kSplits + split) * kTapsH + r;
    TRACEA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int element = 16 * i + mma_c_row(lane(), 2 * half);
        const int s = element / kPixel, c = element % kPixel;
        if (s >= kTapsW || c >= Traits::kChannels) continue;
        float* line = p_.partial +
                      ((taps * kTapsW + s) * Traits::kChannels + c) * p_.out_channels;
        TRACEA_UNROLL
        for (int j = 0; j < kTileK / 8; ++j) {
          const int k = channel_ + 8 * j + mma_c_col(lane(), 0);
          if (k < p_.out_channels) {
            *reinterpret_cast<float2*>(line + k) =
                make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
          }
        }
      }
    }
  }

  const StemWeightsParams& p_;
  u8* const ring_;
  const u32 dy_;
  int channel_, part_, first_, last_;
};

template <class Traits>
TRACEA_DEVICE void conv2d_stem_weights(const StemWeightsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  StemWeights<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
