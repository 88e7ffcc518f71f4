// conv2d_depthwise_weights: the gradient of a depthwise convolution's weights,
//
//   dw[r, s, c] = sum over n, p, q of x[n, p * stride + r * dilation - padding, .., c]
//                                     * dy[n, p, q, c]
//
// as partial sums in f32, (parts, R, S, channels), on every GPU since sm_80. They are summed
// in a second step, always in the same order.
//
// A block has some channels and every so-manieth tile of the images: some columns of some
// rows. It walks down a tile, row by row of x. Rows of x arrive in a ring in shared memory,
// those of dy in another one, which holds as many as meet a row of x. A thread has two
// channels, a strip of columns of dy and all taps, whose sums stay in registers for all tiles:
//
//   step j:  row j of x and row j / stride of dy have landed, barrier
//            start the copies of step j + kStages - 1
//            of each tap row r that meets row j: add x times row (j - r) / stride of dy
//
// With few rows of taps, the rows of dy that they meet take turns in registers.
//
// At the end the strips are added in shared memory. For dilation see conv2d_depthwise.cuh.
// Assumes an even number of channels, and that no image has 2^31 elements or more.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"
#include "tile/image_rows.cuh"
#include "tile/opaque.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

struct DepthwiseWeightsParams {
  const void* x;
  const void* dy;
  float* partial;
  int channels, channel_blocks;
  ImageAxis rows, columns;
  int block_rows;  // of dy in a tile
  int tiles, parts;
};

template <class Traits>
class Conv2dDepthwiseWeights {
 public:
  using Element = typename Traits::Element;
  using RowTaps = AxisTaps<Traits::kTapsH, Traits::kStrideH, 1>;
  using ColumnTaps = AxisTaps<Traits::kTapsW, Traits::kStrideW, 1>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kTileW = Traits::kTileW;
  static constexpr int kPairs = Traits::kChannels / 2;
  static constexpr int kThreads = kPairs * Traits::kStrips;
  static constexpr int kBlockColumns = kTileW * Traits::kStrips;  // of dy
  static constexpr int kWindow = ColumnTaps::entries(kTileW);
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  using RowsX = ImageRows<Element, Traits::kReadColumns, Traits::kChannels,
                          Traits::kCopyBytes, Traits::kPitchBytes, kThreads>;
  using RowsDy = ImageRows<Element, kBlockColumns, Traits::kChannels, Traits::kCopyBytes,
                           Traits::kPitchBytes, kThreads>;
  // Whether the rows of dy that meet a row of x take turns in registers, or are read again.
  static constexpr bool kKeepsRows = Traits::kKeepsRows;
  static constexpr int kUnrolled = kKeepsRows ? RowTaps::kPeriod : 1;  // steps
  // Rows of dy that meet a row of x, or are on their way.
  static constexpr int kStagesDy =
      (Traits::kTapsH - 1 + Ring::kPrologueGroups) / Traits::kStrideH + 1;
  static constexpr int kRingBytes =
      Traits::kStages * RowsX::kRowBytes + kStagesDy * RowsDy::kRowBytes;
  static constexpr int kSumBytes = kTaps * kPairs * static_cast<int>(sizeof(float2));

  static_assert(kThreads == Traits::kThreads, "the launch must have all the strips");
  static_assert((kRingBytes > kSumBytes ? kRingBytes : kSumBytes) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kStrips % Traits::kClassesW == 0, "classes have as many strips");

  TRACEA_DEVICE Conv2dDepthwiseWeights(const DepthwiseWeightsParams& params, u8* smem)
      : p_(params),
        smem_(smem),
        ring_x_(kKeepsRows ? opaque(shared_address(smem)) : shared_address(smem)),
        ring_dy_(ring_x_ + Traits::kStages * RowsX::kRowBytes) {
    u32 block = blockIdx.x;
    channel_ = static_cast<int>(take(block, p_.channel_blocks)) * Traits::kChannels;
    part_ = static_cast<int>(block);
    pair_ = thread() % kPairs;
    strip_ = thread() / kPairs;
    const int strip_class = strip_ % Traits::kClassesW;
    const int strip_first = strip_ / Traits::kClassesW * kTileW;
    const int bytes = 2 * pair_ * kElementBytes;
    read_x_ = bytes + Traits::kPitchBytes * (strip_class * Traits::kClassStrideW +
                                             strip_first * Traits::kStrideW * Traits::kStepW);
    read_dy_ = bytes + Traits::kPitchBytes * (strip_class + Traits::kClassesW * strip_first);
  }

  TRACEA_DEVICE void run() {
    Pair sums[Traits::kTapsH][Traits::kTapsW];
    TRACEA_UNROLL
    for (auto& row : sums) {
      TRACEA_UNROLL
      for (Pair& sum : row) sum = {0.0f, 0.0f};
    }
    TRACEA_NO_UNROLL
    for (int tile = part_; tile < p_.tiles; tile += p_.parts) walk(sums, tile);
    cp_async_wait_group<0>();
    store(sums);
  }

 private:
  using Sums = Pair[Traits::kTapsH][Traits::kTapsW];

  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  template <int kLength>
  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == kLength ? 0 : stage + 1;
  }

  // Adds what a tile contributes.
  TRACEA_DEVICE void walk(Sums& sums, u32 tile) const {
    const int column_block = static_cast<int>(take(tile, p_.columns.blocks));
    const int row_block = static_cast<int>(take(tile, p_.rows.blocks));
    const i64 image = tile;
    const int row_class = row_block % p_.rows.classes;
    const int row_first = row_block / p_.rows.classes * p_.block_rows;
    const int dy_row = row_class + p_.rows.classes * row_first;
    const int x_row = p_.rows.first_in + row_class * p_.rows.class_stride +
                      p_.rows.in_step * (row_first * Traits::kStrideH);
    const int left = ceil_div(p_.rows.out - dy_row, p_.rows.classes);
    const int results = left < p_.block_rows ? left : p_.block_rows;
    if (results <= 0) return;
    const int entries = RowTaps::entries(results);

    const RowsX x(image_of(p_.x, image, p_.rows.in, p_.columns.in), p_.columns.in,
                  p_.channels,
                  p_.columns.first_in + column_block * kBlockColumns * Traits::kClassStrideW,
                  channel_);
    const RowsDy dy(image_of(p_.dy, image, p_.rows.out, p_.columns.out), p_.columns.out,
                    p_.channels, column_block * kBlockColumns, channel_);
    int writing = 0, writing_dy = 0, next = 0;  // step that is copied next, and its stages
    const auto load = [&] {
      if (next < entries) {
        const int row = x_row + p_.rows.in_step * next;
        if (is_inside(row)) {
          x.start(ring_x_ + writing * RowsX::kRowBytes, row, true);
        }
        if (next % Traits::kStrideH == 0) {
          const int k = next / Traits::kStrideH;
          if (k < results) {
            dy.start(ring_dy_ + writing_dy * RowsDy::kRowBytes,
                     dy_row + p_.rows.classes * k, true);
          }
          writing_dy = after<kStagesDy>(writing_dy);
        }
      }
      ++next;
      writing = after<Traits::kStages>(writing);
      cp_async_commit_group();
    };

    __syncthreads();  // the tile before has been read
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load();
    int reading = 0, reading_dy = 0;  // the stages of row j, and of row j / stride
    OpenRows open;
    TRACEA_NO_UNROLL
    for (int first = 0; first < entries; first += kUnrolled) {
      TRACEA_UNROLL
      for (int i = 0; i < kUnrolled; ++i) {
        const int j = first + i;
        if (j >= entries) continue;
        cp_async_wait_group<Ring::kGroupsBehindA>();
        __syncthreads();
        load();
        // What is open, and which taps meet it, depends on i alone if steps are unrolled.
        const int turn = kKeepsRows ? i : j;
        const int last = j / Traits::kStrideH;
        if (turn % Traits::kStrideH == 0) {
          if (j > 0) reading_dy = after<kStagesDy>(reading_dy);
          if (kKeepsRows && last < results) open_row(open, turn, reading_dy);
        }
        if (is_inside(x_row + p_.rows.in_step * j)) {
          add(sums, open, reading, turn, last, reading_dy, results);
        }
        reading = after<Traits::kStages>(reading);
      }
    }
  }

  TRACEA_DEVICE bool is_inside(int row) const { return row >= 0 && row < p_.rows.in; }
  TRACEA_DEVICE const u8* image_of(const void* images, i64 image, int rows,
                                   int columns) const {
    return static_cast<const u8*>(images) +
           image * rows * columns * p_.channels * kElementBytes;
  }

  using Row = Pair[kTileW];
  using OpenRows = Row[kKeepsRows ? RowTaps::kSlots : 1];

  TRACEA_DEVICE void read_dy(Row& row, int stage) const {
    const u32 from = ring_dy_ + stage * RowsDy::kRowBytes + read_dy_;
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      row[i] = shared_pair<Element>(from + i * Traits::kClassesW * Traits::kPitchBytes);
    }
  }
  TRACEA_DEVICE void open_row(OpenRows& open, int turn, int stage) const {
    if constexpr (kKeepsRows) read_dy(open[slot(turn, 0)], stage);
  }
  TRACEA_DEVICE static constexpr int slot(int turn, int behind) {
    return (turn / Traits::kStrideH - behind + RowTaps::kSlots) % RowTaps::kSlots;
  }

  // Adds a row of x times the rows of dy that it meets, the last of which is `last`.
  TRACEA_DEVICE void add(Sums& sums, const OpenRows& open, int stage, int turn, int last,
                         int stage_dy, int results) const {
    Pair x[kWindow];
    const u32 from = ring_x_ + stage * RowsX::kRowBytes + read_x_;
    TRACEA_UNROLL
    for (int i = 0; i < kWindow; ++i) {
      x[i] = shared_pair<Element>(from + i * Traits::kStepW * Traits::kPitchBytes);
    }
    TRACEA_UNROLL
    for (int r = 0; r < Traits::kTapsH; ++r) {
      const int behind = r / Traits::kStrideH, k = last - behind;
      if (r % Traits::kStrideH != turn % Traits::kStrideH || k < 0 || k >= results) continue;
      if constexpr (kKeepsRows) {
        multiply(sums[r], x, open[slot(turn, behind)]);
      } else {
        Row dy;
        read_dy(dy, stage_dy - behind + (stage_dy < behind ? kStagesDy : 0));
        multiply(sums[r], x, dy);
      }
    }
  }

  TRACEA_DEVICE static void multiply(Pair (&sums)[Traits::kTapsW], const Pair (&x)[kWindow],
                                     const Row& dy) {
    TRACEA_UNROLL
    for (int i = 0; i < kTileW; ++i) {
      TRACEA_UNROLL
      for (int s = 0; s < Traits::kTapsW; ++s) {
        const Pair& value = x[i * Traits::kStrideW + s];
        sums[s].x = fmaf(value.x, dy[i].x, sums[s].x);
        sums[s].y = fmaf(value.y, dy[i].y, sums[s].y);
      }
    }
  }

  // Adds the strips, one after another, and writes the block's part.
  TRACEA_DEVICE void store(const Sums& sums) {
    float2* total = reinterpret_cast<float2*>(smem_);
    TRACEA_NO_UNROLL
    for (int strip = 0; strip < Traits::kStrips; ++strip) {
      __syncthreads();
      if (strip_ != strip) continue;
      TRACEA_UNROLL
      for (int tap = 0; tap < kTaps; ++tap) {
        const Pair& sum = sums[tap / Traits::kTapsW][tap % Traits::kTapsW];
        float2& at = total[tap * kPairs + pair_];
        at = strip == 0 ? make_float2(sum.x, sum.y) : make_float2(at.x + sum.x, at.y + sum.y);
      }
    }
    __syncthreads();
    float* part = p_.partial + static_cast<i64>(part_) * kTaps * p_.channels;
    for (int i = thread(); i < kTaps * kPairs; i += kThreads) {
      const int tap = i / kPairs, channel = channel_ + 2 * (i % kPairs);
      store_pair<true>(part + static_cast<i64>(tap) * p_.channels + channel,
                       p_.channels - channel, Pair{total[i].x, total[i].y});
    }
  }

  const DepthwiseWeightsParams& p_;
  u8* const smem_;
  const u32 ring_x_, ring_dy_;
  int channel_, part_, pair_, strip_;  // the block's first channel, and where the thread is
  int read_x_, read_dy_;  // bytes of a row in the ring where the thread's windows begin
};

template <class Traits>
TRACEA_DEVICE void conv2d_depthwise_weights(const DepthwiseWeightsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dDepthwiseWeights<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
