// conv2d_bands: a depthwise convolution without steps on the tensor cores of Hopper,
//
//   y[n, p, q, c] = activation(bias[c] + sum over r, s of x[n, p + r - padding, ..(q, s), c]
//                                                         * w[r, s, c])
//
// and the gradient of x, which is the same with the taps in reverse. Images are NHWC, 16-bit
// elements, sums f32.
//
// Of one channel, a row of taps times 16 columns of x is 8 columns of y, a product with a
// matrix that has the taps along a band, zeros elsewhere:
//
//   y[strip, 0..7] += x[strip, 0..15] * band_r      band_r[k, j] = w[r, k - j]
//
// The rows of that product are 16 strips of 8 columns, of one image or of several. A warp has
// two channels. A block walks down the images, row by row of x, which arrive in a ring and are
// turned so that channels come first (tile/turned_rows.cuh); the sums of the rows of y that
// are not complete take turns in registers (tile/axis_taps.cuh), and complete ones are turned
// back:
//
//   step i   row i + 1 has landed, barrier, start the copies of row i + kStages
//            store the row of y that step i - 1 left in shared memory
//            turn row i + 1
//            multiply row i, which is turned, by all bands; leave the complete row of y
//
// Zeros of a band times an infinity or NaN are NaN. A block that has seen a sum that is NaN
// computes its results again at the end, one by one.
//
// Assumes channels in multiples of 8, at most 9 columns of taps, and that no image has 2^31
// elements or more. PTX ISA: "cp.async", "ldmatrix", "stmatrix", "mma".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/max_pair.cuh"
#include "ptx/mma.cuh"
#include "tile/activation.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/turned_rows.cuh"

namespace tracea {

struct BandsParams {
  const void* x;     // what is read: x, or dy
  const void* w;     // (R, S, 1, channels)
  const void* bias;  // (channels), or null
  void* out;
  int channels, channel_blocks, batch;
  int in_height, in_width, out_height, out_width;
  int first_row, first_column;  // of what is read, where tap 0 of result 0 is
  int row_blocks, column_blocks, block_rows;
};

template <class Traits>
class Conv2dBands {
 public:
  using Element = typename Traits::Element;
  using RowTaps = AxisTaps<Traits::kTapsH, 1, 1>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;

  static constexpr int kStripsOfProduct = 16, kChannelsOfWarp = 2;
  static constexpr int kStrips = Traits::kStrips, kImages = Traits::kImages;
  static constexpr int kChannels = Traits::kChannels, kOctets = kChannels / 8;
  static constexpr int kThreads = kChannels / kChannelsOfWarp * kWarpSize;
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  using Rows = TurnedRows<kImages, kUnitColumns * kStrips + Traits::kTapsW - 1, kStrips + 1,
                          kChannels, kThreads>;
  // A row of y by channels: 16 units of each, and the octets two units further apart, so that
  // reads of four octets, or of two octets of two strips, do not conflict.
  static constexpr int kOutPitch = (kStripsOfProduct + 1) * kUnitBytes;
  static constexpr int kOctetPitch = 8 * kOutPitch + 2 * kUnitBytes;
  static constexpr int kOutBytes = kOctets * kOctetPitch;
  static constexpr u32 kStages = Traits::kStages;
  static constexpr int kRingBytes = Traits::kStages * Rows::kRowBytes;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the channels");
  static_assert(kRingBytes + 2 * Rows::kTurnedBytes + 2 * kOutBytes == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kImages * kStrips <= kStripsOfProduct, "a product has 16 strips");
  static_assert(kOctets == 2 || kOctets == 4, "a warp stores 4 octets of a strip, or 2 of 2");
  static_assert(Traits::kTapsW <= kUnitColumns + 1, "a band has 16 rows and 8 columns");

  TRACEA_DEVICE Conv2dBands(const BandsParams& params, u8* smem)
      : p_(params),
        block_(blockIdx.x),
        channel_first_(static_cast<int>(take(block_, p_.channel_blocks)) * kChannels),
        column_first_(static_cast<int>(take(block_, p_.column_blocks)) * kStrips *
                      kUnitColumns),
        row_first_(static_cast<int>(take(block_, p_.row_blocks)) * p_.block_rows),
        image_first_(static_cast<int>(block_) * kImages),
        results_(least(p_.out_height - row_first_, p_.block_rows)),
        entries_(RowTaps::entries(results_)),
        first_inside_(most(-in_row(0), 0)),
        inside_(least(entries_, p_.in_height - in_row(0)) - first_inside_),
        rows_({p_.x, p_.batch, p_.in_height, p_.in_width, p_.channels, image_first_,
               in_row(first_inside_), p_.first_column + column_first_, channel_first_}),
        ring_(kept(shared_address(smem))),
        turned_(ring_ + kRingBytes),
        out_(turned_ + 2 * Rows::kTurnedBytes),
        worst_(0) {
    place_operand();
    place_results();
  }

  TRACEA_DEVICE void run() {
    Rows::clear(ring_, Traits::kStages);
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load(j);
    load_weights();
    float sums[RowTaps::kSlots][kChannelsOfWarp][4];
    TRACEA_UNROLL
    for (auto& slot : sums) clear(slot);

    arrive(0);
    turn(0);
    TRACEA_NO_UNROLL
    for (int first = 0; first < entries_; first += RowTaps::kPeriod) {
      TRACEA_UNROLL
      for (int phase = 0; phase < RowTaps::kPeriod; ++phase) {
        const int i = first + phase;
        if (i < entries_) {
          arrive(i + 1);
          if (i >= Traits::kTapsH) store(i - 1);
          turn(i + 1);
          add(sums, phase, i);
          if (i >= Traits::kTapsH - 1) leave(sums[(phase + 1) % RowTaps::kSlots], i);
        }
      }
    }
    cp_async_wait_group<0>();
    __syncthreads();
    store(entries_ - 1);
    if (__syncthreads_or(is_nan_pair<Element>(worst_))) compute_again();
  }

 private:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int lane() { return thread() % kWarpSize; }
  TRACEA_DEVICE static int warp() { return warp_uniform(thread() / kWarpSize); }
  TRACEA_DEVICE int channel() const { return channel_first_ + kChannelsOfWarp * warp(); }
  TRACEA_DEVICE static int least(int a, int b) { return a < b ? a : b; }
  TRACEA_DEVICE static int most(int a, int b) { return a > b ? a : b; }
  TRACEA_DEVICE int in_row(int j) const { return p_.first_row + row_first_ + j; }
  // Whether the block needs row j, and it is a row of the images.
  TRACEA_DEVICE bool is_inside(int j) const {
    return j >= first_inside_ && j - first_inside_ < inside_;
  }

  TRACEA_DEVICE void clear(float (&sums)[kChannelsOfWarp][4]) const {
    TRACEA_UNROLL
    for (int c = 0; c < kChannelsOfWarp; ++c) {
      TRACEA_UNROLL
      for (float& sum : sums[c]) sum = c == 0 ? bias_.x : bias_.y;
    }
  }

  // --- rows of x ---------------------------------------------------------------------

  // One group for each row, whether it has copies or not: the waits count groups.
  TRACEA_DEVICE void load(int j) {
    if (is_inside(j)) rows_.start(ring_ + j % kStages * Rows::kRowBytes);
    cp_async_commit_group();
  }

  // Row j has landed, and all have done what comes before.
  TRACEA_DEVICE void arrive(int j) {
    cp_async_wait_group<Ring::kGroupsBehindA>();
    __syncthreads();
    load(j + Ring::kPrologueGroups);
  }

  TRACEA_DEVICE u32 turned(int j) const { return turned_ + j % 2u * Rows::kTurnedBytes; }
  TRACEA_DEVICE void turn(int j) const {
    if (is_inside(j)) {
      rows_.turn(ring_ + j % kStages * Rows::kRowBytes, turned(j));
    }
  }

  // --- products ----------------------------------------------------------------------

  // Where this lane points ldmatrix for 16 columns of the 16 strips: mma's A.
  TRACEA_DEVICE void place_operand() {
    int strip = stmatrix_x4_row(lane());
    if (strip >= kImages * kStrips) strip = 0;  // its results are not stored
    const int unit = strip / kStrips * (kStrips + 1) + strip % kStrips +
                     stmatrix_x4_col(lane()) / kUnitColumns;
    operand_ = kChannelsOfWarp * warp() * Rows::kChannelPitch + unit * kUnitBytes;
  }

  // The bands of the warp's channels: mma's B. And their bias.
  TRACEA_DEVICE void load_weights() {
    const bool exists = channel() < p_.channels;
    const auto* w = static_cast<const u16*>(p_.w) + (exists ? channel() : 0);
    TRACEA_UNROLL
    for (int r = 0; r < Traits::kTapsH; ++r) {
      u32 both[4];  // channels of each element
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int s = mma_b_row(lane(), i) - mma_b_col(lane(), i);
        const bool meets = exists && s >= 0 && s < Traits::kTapsW;
        const int tap = meets ? r * Traits::kTapsW + s : 0;
        const int from = Traits::kFlips ? kTaps - 1 - tap : tap;
        const u32 pair =
            *reinterpret_cast<const u32*>(w + static_cast<i64>(from) * p_.channels);
        both[i] = meets ? pair : 0u;
      }
      TRACEA_UNROLL
      for (int i = 0; i < 2; ++i) {
        bands_[r][0][i] = __byte_perm(both[2 * i], both[2 * i + 1], 0x5410);
        bands_[r][1][i] = __byte_perm(both[2 * i], both[2 * i + 1], 0x7632);
      }
    }
    bias_ = {0.0f, 0.0f};
    if constexpr (Traits::kHasBias) {
      const auto* bias = static_cast<const typename Traits::ElementBias*>(p_.bias);
      if (exists) bias_ = {widen(bias[channel()]), widen(bias[channel() + 1])};
    }
  }

  // Adds row i to all results that it belongs to. One of them begins with it.
  TRACEA_DEVICE void add(float (&sums)[RowTaps::kSlots][kChannelsOfWarp][4], int phase,
                         int i) const {
    if (!is_inside(i)) {
      clear(sums[phase]);
      return;
    }
    TRACEA_UNROLL
    for (int c = 0; c < kChannelsOfWarp; ++c) {
      u32 x[4];
      ldmatrix_x4(x, turned(i) + operand_ + c * Rows::kChannelPitch);
      TRACEA_UNROLL
      for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
        const int r = RowTaps::tap(slot, phase);
        const u32(&band)[2] = bands_[r][c];
        if (r == 0) {
          const float bias = c == 0 ? bias_.x : bias_.y;
          TRACEA_UNROLL
          for (float& sum : sums[slot][c]) sum = bias;
        }
        Mma<Element>::mma(sums[slot][c], x, band[0], band[1]);
      }
    }
  }

  // --- rows of y ---------------------------------------------------------------------

  TRACEA_DEVICE u32 out(int i) const { return out_ + i % 2u * kOutBytes; }
  TRACEA_DEVICE static u32 out_byte(int channel, int strip) {
    return channel / 8 * kOctetPitch + channel % 8 * kOutPitch + strip * kUnitBytes;
  }

  // Leaves a complete row, channels first.
  TRACEA_DEVICE void leave(const float (&sums)[kChannelsOfWarp][4], int i) {
    u32 words[kChannelsOfWarp][2];
    TRACEA_UNROLL
    for (int c = 0; c < kChannelsOfWarp; ++c) {
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        words[c][half] =
            Packed<Element>::from({activate<Traits::kActivation>(sums[c][2 * half]),
                                   activate<Traits::kActivation>(sums[c][2 * half + 1])})
                .bits;
        worst_ = max_nan_pair<Element>(worst_, words[c][half]);
      }
    }
    stmatrix_x4(out(i) + left_, words[0][0], words[0][1], words[1][0], words[1][1]);
  }

  // Which octets of which strips a warp stores: lanes l % 4 have one each, of column l / 4.
  TRACEA_DEVICE static int stored_strip(int quarter) {
    const int first = kOctets == 4 ? warp() : warp() % 4 + warp() / 4 * 8;
    return first + quarter / kOctets * 4;
  }
  TRACEA_DEVICE void place_results() {
    // As rows 2t and 2t + 1 of matrix i, the channels 2i and 2i + 1 of octet t.
    const int row = lane() % 8, matrix = lane() / 8, quarter = row / 2;
    read_ = out_byte(quarter % kOctets * 8 + 2 * matrix + row % 2, stored_strip(quarter));

    const int strip = stored_strip(lane() % 4);
    const int image = image_first_ + strip / kStrips;
    const int column = column_first_ + strip % kStrips * kUnitColumns + lane() / 4;
    const int channel = channel_first_ + lane() % 4 % kOctets * 8;
    stores_ = strip < kImages * kStrips && image < p_.batch && column < p_.out_width &&
              channel < p_.channels;
    const i64 first = (static_cast<i64>(image) * p_.out_height + row_first_) * p_.out_width;
    write_ = static_cast<u16*>(p_.out) + (first + column) * p_.channels + channel;
    left_ = out_byte(kChannelsOfWarp * warp() + lane() / 16, lane() % 16);
  }
  // Stores the next row of the result, which step i left.
  TRACEA_DEVICE void store(int i) {
    Words words;
    ldmatrix_x4_trans(words.w, out(i) + read_);
    if (stores_) *reinterpret_cast<Words*>(write_) = words;
    write_ += static_cast<u32>(p_.out_width) * p_.channels;
  }

  // --- what is not finite ------------------------------------------------------------

  // All results of the block, each from the taps inside of its image alone.
  TRACEA_DEVICE void compute_again() const {
    constexpr int kColumns = kStrips * kUnitColumns;
    const int count = results_ * kImages * kColumns * kChannels;
    TRACEA_NO_UNROLL
    for (int index = thread(); index < count; index += kThreads) {
      u32 rest = static_cast<u32>(index);
      const int channel = channel_first_ + static_cast<int>(take(rest, kChannels));
      const int column = column_first_ + static_cast<int>(take(rest, kColumns));
      const int image = image_first_ + static_cast<int>(take(rest, kImages));
      const int row = row_first_ + static_cast<int>(rest);
      if (channel < p_.channels && column < p_.out_width && image < p_.batch) {
        const i64 at =
            ((static_cast<i64>(image) * p_.out_height + row) * p_.out_width + column) *
                p_.channels +
            channel;
        const float y = activate<Traits::kActivation>(sum_of(image, row, column, channel));
        static_cast<u16*>(p_.out)[at] = static_cast<u16>(Packed<Element>::from({y, y}).bits);
      }
    }
  }

  TRACEA_DEVICE float sum_of(int image, int row, int column, int channel) const {
    const auto* x = static_cast<const Element*>(p_.x) + channel;
    const auto* w = static_cast<const Element*>(p_.w) + channel;
    float sum = 0.0f;
    if constexpr (Traits::kHasBias) {
      sum = widen(static_cast<const typename Traits::ElementBias*>(p_.bias)[channel]);
    }
    TRACEA_NO_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
      const int h = p_.first_row + row + tap / Traits::kTapsW;
      const int v = p_.first_column + column + tap % Traits::kTapsW;
      if (h < 0 || h >= p_.in_height || v < 0 || v >= p_.in_width) continue;
      const i64 pixel = (static_cast<i64>(image) * p_.in_height + h) * p_.in_width + v;
      const i64 from = Traits::kFlips ? kTaps - 1 - tap : tap;
      sum = fmaf(widen(x[pixel * p_.channels]), widen(w[from * p_.channels]), sum);
    }
    return sum;
  }

  const BandsParams& p_;
  u32 block_;
  const int channel_first_, column_first_, row_first_, image_first_;  // of the block
  const int results_, entries_;  // rows of y, and those that they are made of
  const int first_inside_, inside_;  // of the entries
  Rows rows_;
  const u32 ring_, turned_, out_;
  u32 operand_;      // byte of a turned row
  u32 left_, read_;  // bytes of a row of y
  u16* write_;       // where the next row of the result is stored
  bool stores_;
  Pair bias_;
  u32 bands_[Traits::kTapsH][kChannelsOfWarp][2];
  u32 worst_;  // two elements, NaN if a result was
};

template <class Traits>
TRACEA_DEVICE void conv2d_bands(const BandsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dBands<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
