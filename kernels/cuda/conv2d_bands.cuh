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
//   step i   row i + 1 has landed, barrier
//            multiply row i, which is turned, by all bands; meanwhile
//              store the row of y that step i - 1 left in shared memory
//              turn row i + 1
//              start the copies of row i + kStages
//            leave the complete row of y
//
// Blocks have as many rows each, of the images one after another: where an image ends, a
// block begins with the next ones.
//
// Zeros of a band times an infinity or NaN are NaN. A block that has seen a sum that is NaN
// computes its results again at the end, one by one.
//
// Assumes channels in multiples of 8, at most 9 columns of taps, and that no image has 2^31
// elements or more. PTX ISA: "cp.async", "ldmatrix", "stmatrix", "mma".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/max_pair.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "tile/activation.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/opaque.cuh"
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
  int column_blocks, block_rows, all_rows;  // of results, of all images, in all columns
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

  // Where there are registers for it.
  static constexpr bool kInterleaves = Traits::kTapsH > 3;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the channels");
  static_assert(kRingBytes + 2 * Rows::kTurnedBytes + 2 * kOutBytes + kUnitBytes ==
                    Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kImages * kStrips <= kStripsOfProduct, "a product has 16 strips");
  static_assert(kOctets % 2 == 0, "warps store four octets each, of as many strips as it takes");
  static_assert(Traits::kTapsW <= kUnitColumns + 1, "a band has 16 rows and 8 columns");

  TRACEA_DEVICE Conv2dBands(const BandsParams& params, u8* smem)
      : p_(params),
        block_(blockIdx.x),
        channel_first_(static_cast<int>(take(block_, p_.channel_blocks)) * kChannels),
        ring_(opaque(shared_address(smem))),
        turned_(ring_ + kRingBytes),
        out_(turned_ + 2 * Rows::kTurnedBytes),
        zeros_(out_ + 2 * kOutBytes),
        worst_(0) {
    if (thread() < kUnitBytes / 4) st_shared(zeros_ + 4 * thread(), 0u);
    place_fragments();
  }

  TRACEA_DEVICE void run() {
    int row = static_cast<int>(block_) * p_.block_rows;
    const int end = min(row + p_.block_rows, p_.all_rows);
    Rows::clear(ring_, Traits::kStages);
    begin(piece(row, end));
    load_weights();
    while (true) {
      walk();
      const bool is_suspect = __syncthreads_or(is_nan_pair<Element>(worst_));
      // Again, instead of in registers all the way.
      const Piece done = piece(opaque(row), end);
      if (is_suspect) compute_again(done);
      row += done.results;
      if (row >= end) return;
      worst_ = 0;
      begin(piece(row, end));
    }
  }

 private:
  using Sums = float[RowTaps::kSlots][kChannelsOfWarp][4];

  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  TRACEA_DEVICE static int lane() { return thread() % kWarpSize; }
  TRACEA_DEVICE static int warp() { return warp_uniform(thread() / kWarpSize); }
  TRACEA_DEVICE int channel() const { return channel_first_ + kChannelsOfWarp * warp(); }

  // --- a piece: rows of y of the same images -------------------------------------------

  struct Piece {
    int image, column, row, results;
  };

  // The piece that begins with row `row` of all.
  TRACEA_DEVICE Piece piece(int row, int end) const {
    const int line = row / p_.out_height, first = row - line * p_.out_height;
    return {line / p_.column_blocks * kImages,
            line % p_.column_blocks * kStrips * kUnitColumns, first,
            min(p_.out_height - first, end - row)};
  }

  // Starts its first copies.
  TRACEA_DEVICE void begin(const Piece& piece) {
    entries_ = RowTaps::entries(piece.results);
    const int first = p_.first_row + piece.row;
    first_inside_ = max(-first, 0);
    inside_ = min(entries_, p_.in_height - first) - first_inside_;
    rows_.begin({p_.x, p_.batch, p_.in_height, p_.in_width, p_.channels, piece.image,
                 first + first_inside_, p_.first_column + piece.column, channel_first_});
    place_results(piece);
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load(j);
  }

  TRACEA_DEVICE void walk() {
    Sums sums;
    TRACEA_UNROLL
    for (auto& slot : sums) clear(slot);
    arrive();
    Words next;
    rows_.read(next, stage(0));
    rows_.write(next, stage(0), turned(0));
    load(Ring::kPrologueGroups);
    TRACEA_NO_UNROLL
    for (int first = 0; first < entries_; first += RowTaps::kPeriod) {
      TRACEA_UNROLL
      for (int phase = 0; phase < RowTaps::kPeriod; ++phase) {
        const int i = first + phase;
        if (i < entries_) {
          if (is_inside(i)) {
            step<true>(sums, phase, i);
          } else {
            step<false>(sums, phase, i);
          }
        }
      }
    }
    __syncthreads();
    Words last;
    read_result(last, entries_ - 1);
    store(last, true);
  }

  // Row i, which is in the image or not. What the tensor cores do not wait for is between the
  // products of both channels. Rows that do not exist are turned as well.
  template <bool kIsInside>
  TRACEA_DEVICE void step(Sums& sums, int phase, int i) {
    arrive();
    Words result;
    read_result(result, i - 1);
    Words next;
    if constexpr (kInterleaves) {
      rows_.read(next, stage(i + 1));
      if constexpr (kIsInside) multiply(sums, 0, phase, i);
    }
    store(result, i >= Traits::kTapsH);
    if constexpr (!kInterleaves) rows_.read(next, stage(i + 1));
    rows_.write(next, stage(i + 1), turned(i + 1));
    load(i + 1 + Ring::kPrologueGroups);
    if constexpr (kIsInside) {
      if constexpr (!kInterleaves) multiply(sums, 0, phase, i);
      multiply(sums, 1, phase, i);
    } else {
      clear(sums[phase]);
    }
    leave(sums[(phase + 1) % RowTaps::kSlots], i);
  }

  TRACEA_DEVICE void clear(float (&sums)[kChannelsOfWarp][4]) const {
    TRACEA_UNROLL
    for (int c = 0; c < kChannelsOfWarp; ++c) {
      TRACEA_UNROLL
      for (float& sum : sums[c]) sum = c == 0 ? bias_.x : bias_.y;
    }
  }

  // --- rows of x -----------------------------------------------------------------------

  // Whether the piece needs row j, and it is a row of the images.
  TRACEA_DEVICE bool is_inside(int j) const {
    return j >= first_inside_ && j - first_inside_ < inside_;
  }
  TRACEA_DEVICE u32 stage(int j) const { return ring_ + j % kStages * Rows::kRowBytes; }
  TRACEA_DEVICE u32 turned(int j) const { return turned_ + j % 2u * Rows::kTurnedBytes; }

  // One group for each row, whether it has copies or not: the waits count groups.
  TRACEA_DEVICE void load(int j) {
    if (is_inside(j)) rows_.start(stage(j), 2u * p_.in_width * p_.channels);
    cp_async_commit_group();
  }

  // The next row has landed, and all have done what comes before.
  TRACEA_DEVICE static void arrive() {
    cp_async_wait_group<Ring::kGroupsBehindA>();
    __syncthreads();
  }

  // --- products ------------------------------------------------------------------------

  // Where this lane points ldmatrix for 16 columns of the 16 strips, mma's A, and stmatrix and
  // ldmatrix for a row of y.
  TRACEA_DEVICE void place_fragments() {
    int strip = stmatrix_x4_row(lane());
    if (strip >= kImages * kStrips) strip = 0;  // its results are not stored
    const int unit = strip / kStrips * (kStrips + 1) + strip % kStrips +
                     stmatrix_x4_col(lane()) / kUnitColumns;
    operand_ = kChannelsOfWarp * warp() * Rows::kChannelPitch + unit * kUnitBytes;
    left_ = out_byte(kChannelsOfWarp * warp() + lane() / 16, lane() % 16);
    // Rows 2t and 2t + 1 of matrix k are the channels 2k and 2k + 1 of octet t.
    const int row = lane() % 8, matrix = lane() / 8;
    const Stored from = stored(row / 2);
    read_ = out_byte(from.octet * 8 + 2 * matrix + row % 2, from.strip);
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

  // Adds row i to all results that it belongs to, of one channel. One begins with it.
  TRACEA_DEVICE void multiply(Sums& sums, int c, int phase, int i) const {
    u32 x[4];
    ldmatrix_x4(x, turned(i) + operand_ + c * Rows::kChannelPitch);
    TRACEA_UNROLL
    for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
      const int r = RowTaps::tap(slot, phase);
      const u32(&band)[2] = bands_[r][c];
      if (r == 0) {
        TRACEA_UNROLL
        for (float& sum : sums[slot][c]) sum = c == 0 ? bias_.x : bias_.y;
      }
      Mma<Element>::mma(sums[slot][c], x, band[0], band[1]);
    }
  }

  // --- rows of y -----------------------------------------------------------------------

  TRACEA_DEVICE u32 out(int i) const { return out_ + i % 2u * kOutBytes; }
  TRACEA_DEVICE static u32 out_byte(int channel, int strip) {
    return channel / 8 * kOctetPitch + channel % 8 * kOutPitch + strip * kUnitBytes;
  }

  // Leaves a row that is complete, or not a row of the piece, channels first.
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
  struct Stored {
    int strip, octet;
  };
  TRACEA_DEVICE static Stored stored(int quarter) {
    if constexpr (kOctets == 2) {  // two strips whose units do not conflict
      return {warp() % 4 + warp() / 4 * 8 + quarter / 2 * 4, quarter % 2};
    } else {
      const int index = 4 * warp() + quarter;
      return {index / kOctets, index % kOctets};
    }
  }
  TRACEA_DEVICE void place_results(const Piece& piece) {
    const auto [strip, octet] = stored(lane() % 4);
    const int image = piece.image + strip / kStrips;
    const int column = piece.column + strip % kStrips * kUnitColumns + lane() / 4;
    const int channel = channel_first_ + octet * 8;
    stores_ = strip < kImages * kStrips && image < p_.batch && column < p_.out_width &&
              channel < p_.channels;
    const i64 first = (static_cast<i64>(image) * p_.out_height + piece.row) * p_.out_width;
    write_ = static_cast<u16*>(p_.out) + (first + column) * p_.channels + channel;
  }

  // A complete row that step i left.
  TRACEA_DEVICE void read_result(Words& words, int i) const {
    ldmatrix_x4_trans(words.w, out(i) + read_);
  }
  TRACEA_DEVICE void store(const Words& words, bool exists) {
    if (exists && stores_) *reinterpret_cast<Words*>(write_) = words;
    write_ += exists ? static_cast<u32>(p_.out_width) * p_.channels : 0u;
  }

  // --- what is not finite --------------------------------------------------------------

  // All results of the piece, each from the taps inside of its image alone.
  TRACEA_DEVICE void compute_again(const Piece& piece) const {
    constexpr int kColumns = kStrips * kUnitColumns;
    const int count = piece.results * kImages * kColumns * kChannels;
    TRACEA_NO_UNROLL
    for (int index = thread(); index < count; index += kThreads) {
      u32 rest = static_cast<u32>(index);
      const int channel = channel_first_ + static_cast<int>(take(rest, kChannels));
      const int column = piece.column + static_cast<int>(take(rest, kColumns));
      const int image = piece.image + static_cast<int>(take(rest, kImages));
      const int row = piece.row + static_cast<int>(rest);
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
  const int channel_first_;  // of the block
  const u32 ring_, turned_, out_, zeros_;
  u32 operand_, left_, read_;  // bytes of a turned row, and of a row of y
  Pair bias_;
  u32 bands_[Traits::kTapsH][kChannelsOfWarp][2];
  u32 worst_;  // two elements, NaN if a result of the piece was

  // Of the piece: rows of x, and those of them that are in the image.
  int entries_, first_inside_, inside_;
  Rows rows_;
  u16* write_;  // where the next row of y is stored
  bool stores_;
};

template <class Traits>
TRACEA_DEVICE void conv2d_bands(const BandsParams& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  Conv2dBands<Traits>(p, smem_bytes).run();
}

}  // namespace tracea
