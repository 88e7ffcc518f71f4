// How a block walks down an image: rows of what is read arrive in a ring in shared memory, and
// rows of the result are complete one after another.
//
//   step j:   row j has landed, barrier
//             start the copies of row j + kStages - 1
//             add(phase, row j)             to kSlots rows of sums, see axis_taps.cuh
//             finish(slot, result)          for the results that row j completes
//
// A dilated convolution is several without dilation, on every so-manieth row and column:
// blocks take the rows of one of them, threads the columns. In units of those, `step` rows or
// columns apart, the stride is the one that is left when its common factor with the dilation
// is taken out.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/axis_taps.cuh"
#include "tile/common.cuh"
#include "tile/image_rows.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

struct RowWalkParams {
  const void* x;         // what is read: x, or dy
  const void* w;         // (R, S, channels of a group, channels)
  const void* bias;      // (channels), or null
  const void* residual;  // of the result's shape, or null
  void* out;
  void* preactivation;  // null unless it is saved
  int channels, channel_blocks;
  ImageAxis rows, columns;
  int block_rows;  // results of a block
};

template <class Traits>
class RowWalk {
 public:
  using Element = typename Traits::Element;
  using RowTaps = AxisTaps<Traits::kTapsH, Traits::kStrideH, Traits::kBetweenH>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;
  using Rows = ImageRows<Element, Traits::kReadColumns, Traits::kChannels, Traits::kCopyBytes,
                         Traits::kPitchBytes, Traits::kThreads>;
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kBlockColumns = Traits::kTileW * Traits::kStrips;  // of the result
  static constexpr int kRingBytes = Traits::kStages * Rows::kRowBytes;

  static_assert(Traits::kTileW % Traits::kBetweenW == 0,
                "strips begin where an entry meets tap 0");
  static_assert(Traits::kStrips % Traits::kClassesW == 0, "classes have as many strips");

  TRACEA_DEVICE RowWalk(const RowWalkParams& params, u8* ring) : p_(params), ring_(ring) {
    u32 block = blockIdx.x;
    const int channel_block = static_cast<int>(take(block, p_.channel_blocks));
    const int column_block = static_cast<int>(take(block, p_.columns.blocks));
    const int row_block = static_cast<int>(take(block, p_.rows.blocks));
    image = block;
    channel = channel_block * Traits::kChannels;
    column_ = p_.columns.first_out + column_block * kBlockColumns;
    in_column_ = p_.columns.first_in +
                 column_block * (kBlockColumns / Traits::kBetweenW) * Traits::kClassStrideW;
    const int row_class = row_block % p_.rows.classes;
    const int row_first = row_block / p_.rows.classes * p_.block_rows;
    row_ = p_.rows.first_out + row_class + p_.rows.classes * row_first;
    in_row_ = p_.rows.first_in + row_class * p_.rows.class_stride +
              p_.rows.in_step * (row_first * Traits::kStrideH / Traits::kBetweenH);
    const int left = ceil_div(p_.rows.out - row_, p_.rows.classes);
    results = left < p_.block_rows ? left : p_.block_rows;
  }

  // The first column of a strip's results; those of its class are kClassesW apart.
  TRACEA_DEVICE int column(int strip) const {
    return column_ + strip % Traits::kClassesW +
           Traits::kClassesW * (strip / Traits::kClassesW * Traits::kTileW);
  }

  // The byte of a row in the ring where the strip's window begins, at the first channel.
  TRACEA_DEVICE static int window(int strip) {
    const int first = strip / Traits::kClassesW * Traits::kTileW;
    return (strip % Traits::kClassesW * Traits::kClassStrideW +
            first * Traits::kStrideW / Traits::kBetweenW * Traits::kStepW) *
           Traits::kPitchBytes;
  }

  // Where the result's row begins, in pixels of all images.
  TRACEA_DEVICE i64 line(int result) const {
    return (image * p_.rows.out + row_ + p_.rows.classes * result) * p_.columns.out;
  }

  // `prepare` runs while the first rows arrive.
  template <class Prepare, class Add, class Finish>
  TRACEA_DEVICE void run(Prepare&& prepare, Add&& add, Finish&& finish) const {
    const u8* source = static_cast<const u8*>(p_.x) +
                       image * p_.rows.in * p_.columns.in * p_.channels * kElementBytes;
    const Rows rows(source, p_.columns.in, p_.channels, in_column_, channel);
    const int entries = RowTaps::entries(results);
    TRACEA_UNROLL
    for (int j = 0; j < Ring::kPrologueGroups; ++j) load(rows, j, j, entries);
    prepare();
    int reading = 0, writing = Ring::load_stage(0);
    TRACEA_NO_UNROLL
    for (int first = 0; first < entries; first += RowTaps::kPeriod) {
      TRACEA_UNROLL
      for (int phase = 0; phase < RowTaps::kPeriod; ++phase) {
        const int j = first + phase;
        if (j < entries) {
          cp_async_wait_group<Ring::kGroupsBehindA>();
          __syncthreads();
          load(rows, j + Ring::kPrologueGroups, writing, entries);
          if (is_inside(in_row(j))) add(phase, ring_ + reading * Rows::kRowBytes);
          TRACEA_UNROLL
          for (int slot = 0; slot < RowTaps::kSlots; ++slot) {
            if (!RowTaps::completes(slot, phase)) continue;
            // The distance to the last tap depends on the phase alone.
            const int result = RowTaps::completed(slot, phase) +
                               first * Traits::kBetweenH / Traits::kStrideH;
            const bool exists = result >= 0 && result < results &&
                                row_ + p_.rows.classes * result >= 0;
            finish(slot, result, exists);
          }
          reading = after(reading);
          writing = after(writing);
        }
      }
    }
    cp_async_wait_group<0>();
  }

  i64 image;
  int channel;  // the block's first
  int results;  // rows; the block has nothing to do if that is not above zero

 private:
  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
  }
  TRACEA_DEVICE int in_row(int j) const { return in_row_ + p_.rows.in_step * j; }
  TRACEA_DEVICE bool is_inside(int row) const { return row >= 0 && row < p_.rows.in; }

  // One group for each row, whether it has copies or not: the waits count groups.
  TRACEA_DEVICE void load(const Rows& rows, int j, int stage, int entries) const {
    const int row = in_row(j);
    if (j < entries && is_inside(row)) {
      rows.start(shared_address(ring_) + stage * Rows::kRowBytes, row, true);
    }
    cp_async_commit_group();
  }

  const RowWalkParams& p_;
  u8* const ring_;
  int row_, column_, in_row_, in_column_;  // the block's first
};

}  // namespace tracea
