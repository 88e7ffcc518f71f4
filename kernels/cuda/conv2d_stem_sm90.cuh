// conv2d_stem_sm90: convolutions of images with at most four channels, of stride 2 along
// lines, on Hopper: y = epilogue(windows @ weights), accumulated in f32.
//
// Pixels of four channels are 8 bytes, so that windows of neighbouring results begin 16
// bytes apart in a line of the image. That is how rows of 8 x 16 bytes follow one another
// in an operand of wgmma without a swizzle: lines of the image as they are in shared memory
// are the windows of 64 results, which overlap, and nothing is gathered.
//
//   line      |p0 p1|p2 p3|p4 p5|p6 p7|p8 p9| ...      16 bytes each
//   result 0   ======== k16 ==  == k16 ====             window of 8 pixels, 32 entries of k
//   result 1         ======== k16 ==  == k16 ====
//
// A stage is the lines that kLines lines of results need, in boxes for 64 results each,
// copied in pieces of lines. The
// weights, all taps of kTileN channels, stay in shared memory. Each consumer computes some
// of the lines.
//
// Assumes pixels of four 16-bit channels and an even number of them in a line. PTX ISA:
// "Asynchronous warpgroup level matrix shared memory layout".
#pragma once

#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/conv_epilogue.cuh"
#include "tile/conv_roles.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct ConvStemParams {
  const TensorMap* x;  // pixels as two elements of 4 bytes each
  const TensorMap* w;  // (taps, n)
  ConvEpilogueParams<Traits> epilogue;
  int images, rows, columns, n;  // of the result
  int top, left;                 // padding
};

template <class Traits>
struct ConvStemShared {
  alignas(1024) u8 w[ceil_div(Traits::kTileN, 64)][Traits::kDepth * 128];
  alignas(1024) u8 buffers[Traits::kConsumers][Traits::kBuffers][64 * 128];
  alignas(128) u8 x[Traits::kStages][Traits::kLineSlabs][Traits::kBoxBytes];
  RingBarriers<Traits::kStages> ring;
  alignas(16) u64 weights_barrier;
  ConvFinishShared<Traits> finish;
};

template <class Traits>
struct ConvStem {
  using Shared = ConvStemShared<Traits>;
  using Mma = typename Traits::Mma;
  using State = PipelineState<Traits::kStages>;
  static constexpr int kSlabs = Traits::kSlabs;  // of each consumer
  static constexpr int kLines = Traits::kLines;
  static constexpr int kRowSteps = Traits::kWindow / 4;  // of 16 entries, in a line's window
  static constexpr u32 kPitch = Traits::kPieces * Traits::kPiecePixels * 8;
  static constexpr int kInputLines =
      (kLines - 1) * Traits::kStride + (Traits::kTaps - 1) * Traits::kDilation + 1;
  static constexpr u32 kSlabBytesW = Traits::kDepth * 128;
  using DescriptorW = OperandDescriptor<true, kSlabBytesW>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kSlabs * Traits::kConsumers == kLines * Traits::kLineSlabs,
                "consumers share the lines");
  static_assert(kSlabs % Traits::kLineSlabs == 0, "a consumer computes whole lines");
  static_assert(Traits::kDepth == Traits::kTaps * Traits::kWindow * 4, "all taps");
  static_assert(Traits::kPieces * Traits::kPiecePixels >= 2 * 63 + Traits::kWindow,
                "windows of 64 results");
  static_assert(Traits::kPiecePixels * 8 % 128 == 0, "copies begin at lines of 128 bytes");
  static_assert(Traits::kBoxBytes >= kInputLines * kPitch, "a box holds its lines");
  static_assert(Mma::kN == Traits::kTileN, "one instruction spans the columns of the tile");

  const ConvStemParams<Traits>& p;
  Shared& smem;

  TRACEA_DEVICE int n() const {
    return static_cast<int>(blockIdx.x) % ceil_div(p.n, Traits::kTileN) * Traits::kTileN;
  }

  // Calls body(image, line, column) for each tile of this block, whose channels stay.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const u32 n_tiles = ceil_div(p.n, Traits::kTileN);
    const u32 lines = ceil_div(p.rows, kLines);
    const u32 columns = ceil_div(p.columns, 64 * Traits::kLineSlabs);
    const u32 tiles = p.images * lines * columns;
    TRACEA_NO_UNROLL
    for (u32 tile = blockIdx.x / n_tiles; tile < tiles; tile += gridDim.x / n_tiles) {
      const Pixel at = Pixel::at(tile, lines, columns);
      body(at.image, at.row * kLines, at.column * 64 * Traits::kLineSlabs);
    }
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      smem.ring.initialize(Traits::kConsumers);
      mbarrier_init(shared_address(&smem.weights_barrier), 1);
      smem.finish.initialize();
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // One thread of the block.
  TRACEA_DEVICE void produce(int) const {
    const u32 weights = shared_address(&smem.weights_barrier);
    mbarrier_arrive_expect_tx(weights, sizeof(smem.w));
    TRACEA_UNROLL
    for (int slab = 0; slab < ceil_div(Traits::kTileN, 64); ++slab) {
      TRACEA_UNROLL
      for (int row = 0; row < Traits::kDepth; row += Traits::kBoxRowsW) {
        cp_async_bulk_tensor_3d(shared_address(smem.w[slab]) + row * 128, p.w,
                                n() + 64 * slab, row, 0, weights);
      }
    }
    State state;
    for_each_tile([&](int image, int line, int column) {
      const u32 full = smem.ring.refill(state, Traits::kLineSlabs * kInputLines * kPitch);
      TRACEA_UNROLL
      for (int slab = 0; slab < Traits::kLineSlabs; ++slab) {
        const u32 box = shared_address(smem.x[state.stage_idx][slab]);
        const int first = 2 * (column + 64 * slab) - p.left;
        TRACEA_NO_UNROLL
        for (int i = 0; i < kInputLines; ++i) {
          TRACEA_UNROLL
          for (int piece = 0; piece < Traits::kPieces; ++piece) {
            const int pixels = piece * Traits::kPiecePixels;
            cp_async_bulk_tensor_3d(box + i * kPitch + 8 * pixels, p.x, 2 * (first + pixels),
                                    line * Traits::kStride - p.top + i, image, full);
          }
        }
      }
      state.advance();
    });
  }

  // The windows of 64 results that begin at `address`: groups of 8 rows, and the two halves
  // of a k16 step, follow one another.
  TRACEA_DEVICE static u64 windows(u32 address) {
    constexpr u64 kStrideBytes = 8 * 16, kLeadingBytes = 16;
    return kStrideBytes / 16 << 32 | kLeadingBytes / 16 << 16 | (address & 0x3FFFFu) / 16;
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int first_line = consumer * (kSlabs / Traits::kLineSlabs);
    const u64 w = DescriptorW::encode(shared_address(smem.w[0]));
    ConvEpilogue<Traits> epilogue =
        smem.finish.epilogue(p.epilogue, smem.buffers[consumer], consumer);
    State state;
    wait_parity(shared_address(&smem.weights_barrier), 0);
    for_each_tile([&](int image, int line, int column) {
      const auto corner = [&](int slab) {
        return ConvCorner{column + slab % Traits::kLineSlabs * 64,
                          line + first_line + slab / Traits::kLineSlabs, image, 0};
      };
      epilogue.prefetch(corner, n(), ConvRows{});
      float accumulators[kSlabs][Mma::kAccumulators];
      smem.ring.wait(state);
      const u32 lines = shared_address(smem.x[state.stage_idx][0]) +
                        first_line * Traits::kStride * kPitch;
      wgmma_fence();
      TRACEA_UNROLL
      for (int step = 0; step < Traits::kTaps * kRowSteps; ++step) {
        const u32 tap = step / kRowSteps * Traits::kDilation * kPitch + step % kRowSteps * 32;
        TRACEA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          const u32 of_line = slab / Traits::kLineSlabs * Traits::kStride * kPitch;
          const u32 of_box = slab % Traits::kLineSlabs * Traits::kBoxBytes;
          Mma::mma(accumulators[slab], windows(lines + of_line + of_box + tap),
                   w + step * DescriptorW::kStep, step != 0);
        }
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      smem.ring.release(state.stage_idx, thread);
      state.advance();
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence_operands(accumulators[slab]);
      epilogue.store(accumulators, corner, n());
    });
    epilogue.drain();
  }
};

template <class Traits>
TRACEA_DEVICE void conv2d_stem_sm90(const ConvStemParams<Traits>& p) {
  using Kernel = ConvStem<Traits>;
  const Kernel kernel{p, swizzled_shared<typename Kernel::Shared>()};
  kernel.initialize();
  run_roles<1, 40, 232>(kernel);
}

}  // namespace tracea
