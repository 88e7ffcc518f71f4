// conv2d_bands_weights: the gradient of a depthwise convolution's weights, without steps, on
// the tensor cores of Hopper,
//
//   dw[r, s, c] = sum over n, p, q of x[n, p + r - padding, ..(q, s), c] * dy[n, p, q, c]
//
// as partial sums in f32, (parts, R, S, channels). They are summed in a second step, always
// in the same order. Of one channel, rows of x and dy, in strips of 8 columns of dy:
//
//   d_r[j, k] += sum over strips of x[strip, j] * dy[strip, k]     j = 0..15, k = 0..7
//   dw[r, s]   = sum over k of d_r[k + s, k]
//
// A product has 16 strips, of one image or of several. A warp has two channels, and all d_r in
// registers. Blocks have as many rows of dy each, of the images one after another, and walk
// down them; rows of x and dy arrive in a ring and are turned so that channels come first
// (tile/turned_rows.cuh). The rows of dy that meet a row of x take turns in registers:
//
//   step i   rows i + 1 have landed, barrier, start the copies of rows i + kStages
//            row i of x times rows i - r of dy; meanwhile turn rows i + 1
//
// Assumes what conv2d_bands.cuh does. PTX ISA: "cp.async", "ldmatrix", "stmatrix", "mma".
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/opaque.cuh"
#include "tile/pipeline.cuh"
#include "tile/turned_rows.cuh"

namespace tracea {

struct BandsWeightsParams {
  const void* x;
  const void* dy;
  float* partial;
  int channels, channel_blocks, batch;
  int in_height, in_width, out_height, out_width;
  int first_row, first_column;  // of x, where tap 0 of dy's first row and column is
  int column_blocks, block_rows, all_rows;  // of dy, of all images, in all columns
};

template <class Traits>
class Conv2dBandsWeights {
 public:
  using Element = typename Traits::Element;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr int kStripsOfProduct = 16, kChannelsOfWarp = 2;
  static constexpr int kTapsH = Traits::kTapsH, kTapsW = Traits::kTapsW;
  static constexpr int kStrips = Traits::kStrips, kImages = Traits::kImages;
  static constexpr int kChannels = Traits::kChannels;
  static constexpr int kThreads = kChannels / kChannelsOfWarp * kWarpSize;
  static constexpr int kBlockColumns = kStrips * kUnitColumns;
  using RowsX = TurnedRows<kImages, kBlockColumns + kTapsW - 1, kStrips + 1, kChannels, kThreads>;
  using RowsDy = TurnedRows<kImages, kBlockColumns, kStrips, kChannels, kThreads>;
  static constexpr u32 kStages = Traits::kStages;
  static constexpr int kRingX = Traits::kStages * RowsX::kRowBytes;
  static constexpr int kRingDy = Traits::kStages * RowsDy::kRowBytes;
  static constexpr int kPitchOfSums = kUnitColumns + 1;  // of d_r, staged by each warp
  static constexpr int kStagedBytes = kStripsOfProduct * kPitchOfSums * 4;

  static constexpr bool kInterleaves = kTapsH > 3;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the channels");
  static_assert(kRingX + kRingDy + 2 * (RowsX::kTurnedBytes + RowsDy::kTurnedBytes) +
                        kUnitBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kThreads / kWarpSize * kStagedBytes <= kRingX, "sums are staged in the ring");
  static_assert(kImages * kStrips <= kStripsOfProduct, "a product has 16 strips");
  static_assert(kTapsW <= kUnitColumns + 1, "a product has 16 columns of x and 8 of dy");

  TRACEA_DEVICE Conv2dBandsWeights(const BandsWeightsParams& params, u8* smem)
      : p_(params),
        part_(blockIdx.x),
        channel_first_(static_cast<int>(take(part_, p_.channel_blocks)) * kChannels),
        ring_x_(opaque(shared_address(smem))),
        ring_dy_(ring_x_ + kRingX),
        turned_x_(ring_dy_ + kRingDy),
        turned_dy_(turned_x_ + 2 * RowsX::kTurnedBytes),
        zeros_(turned_dy_ + 2 * RowsDy::kTurnedBytes) {
    if (thread() < kUnitBytes / 4) st_shared(zeros_ + 4 * thread(), 0u);
    RowsX::clear(ring_x_, Traits::kStages);
    place_operands();
  }

  TRACEA_DEVICE void run() {
    Sums sums = {};
    int row = static_cast<int>(part_) * p_.block_rows;
    const int last = row + p_.block_rows, end = last < p_.all_rows ? last : p_.all_rows;
    TRACEA_NO_UNROLL
    while (row < end) {
      walk(sums, row, end);
      // Again, instead of in registers all the way.
      row += rows_left(opaque(row), end);
    }
    cp_async_wait_group<0>();
    __syncthreads();
    store(sums);
  }

 private:
  using Sums = float[kTapsH][kChannelsOfWarp][4];

  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int lane() { return thread() % kWarpSize; }
  TRACEA_DEVICE static int warp() { return warp_uniform(thread() / kWarpSize); }

  // Where this lane points ldmatrix, transposed: 16 columns of x for mma's A, and 8 columns of
  // dy of both channels for its B. The rows are strips; those that do not exist are zeros.
  TRACEA_DEVICE void place_operands() {
    const int first = kChannelsOfWarp * warp(), row = lane() % 8, matrix = lane() / 8;
    const int strip_x = row + matrix / 2 * 8, strip_dy = row + matrix % 2 * 8;
    const int unit = strip_x / kStrips * (kStrips + 1) + strip_x % kStrips + matrix % 2;
    x_exists_ = strip_x < kImages * kStrips;
    dy_exists_ = strip_dy < kImages * kStrips;
    operand_x_ = turned_x_ + first * RowsX::kChannelPitch + unit * kUnitBytes;
    operand_dy_ =
        turned_dy_ + (first + matrix / 2) * RowsDy::kChannelPitch + strip_dy * kUnitBytes;
  }

  // From row `row` of all on, to the end of their images.
  TRACEA_DEVICE int rows_left(int row, int end) const {
    const int left = p_.out_height - row % p_.out_height;
    return left < end - row ? left : end - row;
  }

  // Adds what these rows contribute.
  TRACEA_DEVICE void walk(Sums& sums, int row, int end_row) const {
    const int line = row / p_.out_height, image = line / p_.column_blocks * kImages;
    const int column = line % p_.column_blocks * kBlockColumns;
    const int own = row - line * p_.out_height;
    const int results = rows_left(row, end_row);
    const int entries = results + kTapsH - 1, first = p_.first_row + own;
    const int begin = first < 0 ? -first : 0;  // entries that are rows of x
    const int end = entries < p_.in_height - first ? entries : p_.in_height - first;

    RowsX x;
    x.begin({p_.x, p_.batch, p_.in_height, p_.in_width, p_.channels, image, first + begin,
             p_.first_column + column, channel_first_});
    RowsDy dy;
    dy.begin({p_.dy, p_.batch, p_.out_height, p_.out_width, p_.channels, image, own, column,
              channel_first_});
    const auto load = [&](int j) {
      const u32 stage = j % kStages;
      if (j >= begin && j < end) {
        x.start(ring_x_ + stage * RowsX::kRowBytes, 2u * p_.in_width * p_.channels);
      }
      if (j < results) {
        dy.start(ring_dy_ + stage * RowsDy::kRowBytes, 2u * p_.out_width * p_.channels);
      }
      cp_async_commit_group();
    };
    const auto arrive = [&](int j) {
      cp_async_wait_group<Ring::kGroupsBehindA>();
      __syncthreads();
      load(j + Ring::kPrologueGroups);
    };
    Words next_x, next_dy;
    const auto stage_x = [&](int j) { return ring_x_ + j % kStages * RowsX::kRowBytes; };
    const auto stage_dy = [&](int j) { return ring_dy_ + j % kStages * RowsDy::kRowBytes; };
    const auto read = [&](int j) {
      x.read(next_x, stage_x(j));
      dy.read(next_dy, stage_dy(j));
    };
    const auto write = [&](int j) {
      x.write(next_x, stage_x(j), turned_x_ + j % 2u * RowsX::kTurnedBytes);
      dy.write(next_dy, stage_dy(j), turned_dy_ + j % 2u * RowsDy::kTurnedBytes);
    };

    u32 open[kTapsH][4] = {};  // rows of dy that meet a row of x
    __syncthreads();           // the rows before have been read
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load(j);
    arrive(0);
    read(0);
    write(0);
    TRACEA_NO_UNROLL
    for (int step = 0; step < entries; step += kTapsH) {
      TRACEA_UNROLL
      for (int phase = 0; phase < kTapsH; ++phase) {
        const int i = step + phase;
        if (i < entries) {
          arrive(i + 1);
          const bool exists = i >= begin && i < end;
          if constexpr (kInterleaves) {
            read_dy(open[phase], i, i < results);
            read(i + 1);
            multiply(sums, open, 0, phase, i, exists);
            write(i + 1);
          } else {
            read(i + 1);
            write(i + 1);
            read_dy(open[phase], i, i < results);
            multiply(sums, open, 0, phase, i, exists);
          }
          multiply(sums, open, 1, phase, i, exists);
        }
      }
    }
  }

  // Row i of dy, both channels; zeros if it does not exist.
  TRACEA_DEVICE void read_dy(u32 (&row)[4], int i, bool exists) const {
    const u32 at = operand_dy_ + i % 2u * RowsDy::kTurnedBytes;
    ldmatrix_x4_trans(row, exists && dy_exists_ ? at : zeros_);
  }

  // Adds the products of a channel of row i of x.
  TRACEA_DEVICE void multiply(Sums& sums, const u32 (&open)[kTapsH][4], int c, int phase, int i,
                              bool exists) const {
    const u32 at = operand_x_ + i % 2u * RowsX::kTurnedBytes + c * RowsX::kChannelPitch;
    u32 x[4];
    ldmatrix_x4_trans(x, exists && x_exists_ ? at : zeros_);
    TRACEA_UNROLL
    for (int r = 0; r < kTapsH; ++r) {
      const u32(&dy)[4] = open[(phase - r + kTapsH) % kTapsH];
      Mma<Element>::mma(sums[r][c], x, dy[2 * c], dy[2 * c + 1]);
    }
  }

  // Adds along the bands, and writes the block's part.
  TRACEA_DEVICE void store(const Sums& sums) const {
    const u32 staged = ring_x_ + warp() * kStagedBytes;
    const int channel = channel_first_ + kChannelsOfWarp * warp();
    TRACEA_UNROLL
    for (int r = 0; r < kTapsH; ++r) {
      TRACEA_UNROLL
      for (int c = 0; c < kChannelsOfWarp; ++c) {
        __syncwarp();
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) {
          st_shared(staged + 4 * (mma_c_row(lane(), i) * kPitchOfSums + mma_c_col(lane(), i)),
                    sums[r][c][i]);
        }
        __syncwarp();
        if (lane() < kTapsW && channel < p_.channels) {
          float sum = 0.0f;
          TRACEA_UNROLL
          for (int k = 0; k < kUnitColumns; ++k) {
            u32 bits;
            ld_shared(staged + 4 * ((k + lane()) * kPitchOfSums + k), bits);
            sum += __uint_as_float(bits);
          }
          const i64 tap = static_cast<i64>(part_) * kTapsH * kTapsW + r * kTapsW + lane();
          p_.partial[tap * p_.channels + channel + c] = sum;
        }
      }
    }
  }

  const BandsWeightsParams& p_;
  u32 part_;
  const int channel_first_;  // of the block
  const u32 ring_x_, ring_dy_, turned_x_, turned_dy_, zeros_;
  u32 operand_x_, operand_dy_;
  bool x_exists_, dy_exists_;  // the strip that the lane points at
};

template <class Traits>
TRACEA_DEVICE void conv2d_bands_weights(const BandsWeightsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dBandsWeights<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
