// conv2d_weights_sm90: the gradient of a convolution's weights on Hopper,
//
//   dw[r, s, c, k] = sum over pixels of x[pixel as tap (r, s) sees it, c] * dy[pixel, k]
//
// as partial sums over ranges of pixels, f32, (parts, R, S, C of a group, K). They are summed
// in a second step, always in the same order; where there is one part, it is dw, rounded here.
//
// An implicit product whose k are the pixels of y, 64 in a stage. Its rows are channels of dy,
// its columns those of x, in slabs of 64 that belong to one tap each: some columns of dw are
// those of several taps, so that one copy of dy meets them all.
//
//                  kTileN: slabs of x           producer:   wait empty -> expect bytes ->
//               +--------+--------+                         copy slabs of dy and of x
//   kTileM, dy  | cons 0 | cons 2 |             consumer w: wait full -> wgmma -> arrive empty
//               | cons 1 | cons 3 |
//               +--------+--------+             A slab is 64 pixels of 128 swizzled bytes of
//                                               channels, which tensor cores read along m or n
//                                               if elements have 16 bits.
//
// Slabs of one channel chunk and the kTaps taps of a filter's line may share one copy of x,
// a few pixels longer: pixels are then counted with the zeros behind a line, which are those
// in front of the next one, and a tap sees them kShift further on than the one before. The
// swizzle is a function of the address, so that a slab may begin at any row of a copy.
//
// Of groups (kIsGrouped) of kGroup channels, as many in as out, a tile is 64 channels of dy by
// the same channels of x, for some taps, and what joins two groups is dropped.
//
// A block computes one tile of one part. Both operands are copied by im2col tensor maps;
// pixels beyond the last one are zeros in both.
//
// Assumes pixels of x and dy multiples of 16 bytes, and fewer than 2^31 pixels.
// PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "ptx/sync.cuh"
#include "ptx/tma_im2col.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/conv_roles.cuh"
#include "tile/fragment.cuh"
#include "tile/fragment_epilogue.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

struct ConvWeightsSm90Params {
  const TensorMap* x;
  const TensorMap* dy;
  void* out;
  int pixels, height, width;  // of y, as they are counted
  int first_row, first_column, stride_h, stride_w, dilation_h, dilation_w;
  int kernel_width, slabs, chunks;  // slabs of all taps, and of one
  int channels, out_channels;
  int n_tiles, m_tiles, parts;
};

template <class Traits>
struct ConvWeightsSm90Shared {
  alignas(1024) u8 a[Traits::kStages][Traits::kTileM * 128];
  alignas(1024) u8 b[Traits::kStages][Traits::kRowsB * 128];
  RingBarriers<Traits::kStages> ring;
};

template <class Traits>
class ConvWeightsSm90 {
 public:
  using Shared = ConvWeightsSm90Shared<Traits>;
  using Mma = typename Traits::Mma;
  using Element = typename Traits::ElementOut;
  using State = PipelineState<Traits::kStages>;

  static constexpr int kPixels = 64;  // of a stage
  static constexpr int kSlab = 64;    // channels
  static constexpr u32 kSlabBytes = kPixels * 128;
  static constexpr int kSlabsM = Traits::kTileM / kSlab, kSlabsN = Traits::kTileN / kSlab;
  static constexpr int kConsumers = Traits::kConsumersM * Traits::kConsumersN;
  static constexpr int kRows = kSlabsM / Traits::kConsumersM;  // slabs of a consumer
  static constexpr int kColumns = kSlabsN / Traits::kConsumersN;
  static constexpr int kTaps = Traits::kTaps;  // whose slabs of x are one copy
  static constexpr bool kIsGrouped = Traits::kIsGrouped;
  static constexpr int kGroup = Traits::kGroup;
  static constexpr int kCopies = kSlabsN / kTaps;
  static constexpr int kCopiedRows = kPixels + (kTaps - 1) * Traits::kShift;
  static constexpr u32 kCopyBytes = ceil_div(kCopiedRows, 8) * 1024;
  static constexpr u32 kCopiedBytes = kSlabsM * kSlabBytes + kCopies * kCopiedRows * 128;
  static constexpr int kSteps = kPixels / 16;
  using DescriptorA = OperandDescriptor<true, kSlabBytes>;
  using DescriptorB = OperandDescriptor<true, kTaps == 1 ? kSlabBytes : Traits::kShift * 128>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize,
                "one producer warpgroup and the consumers");
  static_assert(kRows * Traits::kConsumersM == kSlabsM &&
                    kColumns * Traits::kConsumersN == kSlabsN && Mma::kN == kColumns * kSlab,
                "consumers hold whole slabs, all columns by one instruction");
  static_assert(!kIsGrouped || (Traits::kTileM == kSlab && kSlab % kGroup == 0),
                "a tile has whole groups, of the same channels of x and dy");
  static_assert(kTaps == 1 || kTaps == kColumns, "an instruction reads one copy");
  static_assert(kCopies * kCopyBytes == Traits::kRowsB * 128, "a stage holds the copies");

  TRACEA_DEVICE ConvWeightsSm90(const ConvWeightsSm90Params& params, Shared& shared)
      : p_(params), smem_(shared) {
    u32 block = blockIdx.x;
    n_ = static_cast<int>(block % p_.n_tiles) * kCopies;
    block /= p_.n_tiles;
    m_ = static_cast<int>(block % p_.m_tiles) * Traits::kTileM;
    part_ = static_cast<int>(block / p_.m_tiles);
    const int steps = ceil_div(p_.pixels, kPixels);
    first_ = static_cast<int>(static_cast<i64>(steps) * part_ / p_.parts);
    last_ = static_cast<int>(static_cast<i64>(steps) * (part_ + 1) / p_.parts);
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      smem_.ring.initialize(kConsumers);
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // One thread of the block.
  TRACEA_DEVICE void produce(int) const {
    int column[kCopies];  // of each copy of x: its channel and the offsets of its tap
    u16 offset_h[kCopies], offset_w[kCopies];
    TRACEA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      // Beyond the last one the sums are stored nowhere.
      const int last = p_.slabs / kTaps - 1, copy = n_ + i < last ? n_ + i : last;
      const int tap = copy / p_.chunks * kTaps, r = tap / p_.kernel_width;
      column[i] = kIsGrouped ? m_ : copy % p_.chunks * kSlab;
      offset_h[i] = static_cast<u16>(r * p_.dilation_h);
      offset_w[i] = static_cast<u16>((tap - r * p_.kernel_width) * p_.dilation_w);
    }
    State state;
    TRACEA_NO_UNROLL
    for (int step = first_; step < last_; ++step, state.advance()) {
      const u32 full = smem_.ring.refill(state, kCopiedBytes);
      const u32 a = shared_address(smem_.a[state.stage_idx]);
      const Pixel at = Pixel::at(step * kPixels, p_.height, p_.width);
      TRACEA_UNROLL
      for (int i = 0; i < kSlabsM; ++i) {
        cp_async_bulk_tensor_4d_im2col(a + i * kSlabBytes, p_.dy, m_ + i * kSlab, at.column,
                                       at.row, at.image, 0, 0, full);
      }
      const int w = p_.first_column + at.column * p_.stride_w;
      const int h = p_.first_row + at.row * p_.stride_h;
      const u32 b = shared_address(smem_.b[state.stage_idx]);
      TRACEA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        cp_async_bulk_tensor_4d_im2col(b + i * kCopyBytes, p_.x, column[i], w, h, at.image,
                                       offset_w[i], offset_h[i], full);
      }
    }
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = consumer % Traits::kConsumersM * kRows;         // slabs
    const int column = consumer / Traits::kConsumersM * kColumns / kTaps;  // copies
    const u64 first_a =
        DescriptorA::encode(shared_address(smem_.a[0]) + row * kSlabBytes);
    const u64 first_b =
        DescriptorB::encode(shared_address(smem_.b[0]) + column * kCopyBytes);
    float sums[kRows][Mma::kAccumulators];  // (64, kColumns * 64) for each slab
    TRACEA_UNROLL
    for (auto& slab : sums) {
      TRACEA_UNROLL
      for (float& sum : slab) sum = 0.0f;
    }
    State state;     // the stage to multiply next
    State finished;  // the oldest stage not yet released
    TRACEA_NO_UNROLL
    for (int step = first_; step < last_; ++step, state.advance()) {
      smem_.ring.wait(state);
      multiply_stage<Mma, DescriptorA, DescriptorB, kSteps>(
          sums, first_a + state.stage_idx * (Traits::kTileM * 128 / 16),
          first_b + state.stage_idx * (Traits::kRowsB * 128 / 16), true);
      wgmma_wait_group<1>();
      if (step > first_) {
        smem_.ring.release(finished.stage_idx, thread);
        finished.advance();
      }
    }
    wgmma_wait_group<0>();
    TRACEA_UNROLL
    for (auto& slab : sums) wgmma_fence_operands(slab);
    store(sums, m_ + row * kSlab, n_ + column, thread);
  }

 private:
  // Rows are channels of dy, which are next to each other in dw: those of eight lanes.
  TRACEA_DEVICE void store(const float (&sums)[kRows][Mma::kAccumulators], int m, int n,
                           int thread) const {
    TRACEA_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int copy = n + i / kTaps;
      if (copy * kTaps >= p_.slabs) return;
      const int tap = copy / p_.chunks * kTaps + i % kTaps;
      const int first = kIsGrouped ? m : copy % p_.chunks * kSlab;
      const i64 taps = static_cast<i64>(part_) * (p_.slabs / p_.chunks) + tap;
      TRACEA_UNROLL
      for (int j = 0; j < kSlab; j += 8) {
        TRACEA_UNROLL
        for (int element = 0; element < 4; ++element) {
          const int channel = first + j + wgmma_accumulator_col(thread, element);
          if (channel >= p_.channels) continue;
          const i64 at = kIsGrouped ? taps * kGroup + channel % kGroup
                                    : taps * p_.channels + channel;
          Element* line = static_cast<Element*>(p_.out) + at * p_.out_channels;
          TRACEA_UNROLL
          for (int row = 0; row < kRows; ++row) {
            const int k = m + row * kSlab + wgmma_accumulator_row(thread, element);
            const float sum = sums[row][4 * ((i * kSlab + j) / 8) + element];
            if (kIsGrouped && k / kGroup != channel / kGroup) continue;
            if (k < p_.out_channels) store_pair<false>(line + k, 1, Pair{sum, 0.0f});
          }
        }
      }
    }
  }

  const ConvWeightsSm90Params& p_;
  Shared& smem_;
  int n_, m_, part_;   // first copy of x, first channel of dy
  int first_, last_;   // steps of 64 pixels
};

template <class Traits>
TRACEA_DEVICE void conv2d_weights_sm90(const ConvWeightsSm90Params& p) {
  using Kernel = ConvWeightsSm90<Traits>;
  const Kernel kernel(p, swizzled_shared<typename Kernel::Shared>());
  kernel.initialize();
  run_roles<1, Traits::kProducerRegisters, Traits::kConsumerRegisters>(kernel);
}

}  // namespace tracea
