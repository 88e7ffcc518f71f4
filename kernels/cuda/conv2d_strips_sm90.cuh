// conv2d_strips_sm90: convolutions of stride 1, or the gradient of their input, on Hopper,
// whose taps read one copy of the pixels: y = epilogue(sum over taps of pixels @ weights).
//
// Pixels are counted through images with zeros behind every line and every image, as many as
// the padding of one side: those behind a line are those in front of the next one. A tap
// then sees the pixels of a tile at a fixed distance behind its first one, in one strip:
//
//   strip      |0 a b c|0 d e f|0 g h i|0 0 0 0|0 j ...    images of 3 x 3, padding 1
//   tap 0, 0    ==================                         distance 0
//   tap 0, 1      ==================                       distance 1
//   tap 1, 0            ==================                 distance 4, a line
//
// A strip is rows of 128 swizzled bytes, a chunk of channels. The swizzle is a function of
// the address, so that a tile may begin at any row of it. Results at the zeros behind a line
// or an image are computed, too, and dropped.
//
// One warp keeps strips coming, another the weights of tap after tap; if those of all taps
// fit (kResident), they are copied once, and a block keeps its channels. Consumers split the
// pixels of a tile, or take tiles in turn (ping-pong): one finishes its own while the other
// multiplies.
//
// Assumes every pixel and every row of weights a multiple of 16 bytes, and fewer than 2^31
// pixels. PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_im2col.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/conv_epilogue.cuh"
#include "tile/conv_roles.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct ConvStripsParams {
  const TensorMap* x;
  const TensorMap* w;
  ConvEpilogueParams<Traits> epilogue;
  int images, lines, line;  // lines of an image and pixels of a line, with the zeros
  int n, channels;          // of the result, and those that are summed over
  int top, left;            // padding
};

template <class Traits>
struct ConvStripsShared {
  alignas(1024) u8 x[Traits::kStrips][Traits::kStripRows * 128];
  alignas(1024) u8 w[Traits::kStages][Traits::kRowsB * 128];
  alignas(1024) u8 buffers[Traits::kConsumers][Traits::kBuffers][64 * 128];
  RingBarriers<Traits::kStrips> strips;
  RingBarriers<Traits::kStages> weights;
  ConvFinishShared<Traits> finish;
};

template <class Traits>
struct ConvStrips {
  using Shared = ConvStripsShared<Traits>;
  using Mma = typename Traits::Mma;
  using StripState = PipelineState<Traits::kStrips>;
  using WeightsState = PipelineState<Traits::kStages>;
  static constexpr int kSlabs = Traits::kSlabs;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kPingPong = Traits::kPingPong;
  static constexpr int kTileConsumers = kPingPong ? 1 : kConsumers;  // that share a tile
  static constexpr int kTaps = Traits::kTapsH * Traits::kTapsW;
  static constexpr int kRowElements = 128 / Traits::kElementBytes;
  static constexpr int kChunkBytes = Traits::kChunk * Traits::kElementBytes;
  static constexpr int kSteps = kChunkBytes / 32;
  static constexpr bool kMnMajorB = !Traits::kTransB;
  static constexpr u32 kSlabBytesB = Traits::kChunk * 128;
  static constexpr int kSlabsB = ceil_div(Traits::kTileN, kRowElements);
  using DescriptorA = OperandDescriptor<false, 0>;
  using DescriptorB = OperandDescriptor<kMnMajorB, kSlabBytesB>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kTileM == kTileConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(Mma::kN == Traits::kTileN, "one instruction spans the columns of the tile");
  static_assert(!kMnMajorB || Traits::kElementBytes == 2,
                "the tensor cores read only 16-bit operands along n");
  static_assert(!kMnMajorB || Traits::kTileN % kRowElements == 0, "whole slabs of weights");
  static_assert(Traits::kRowsB == (kMnMajorB ? kSlabsB * Traits::kChunk : Traits::kTileN),
                "a stage is the weights of a tap");
  static_assert(Traits::kStripRows % Traits::kCopyRows == 0, "a strip is whole copies");
  static_assert(kConsumers == 2, "named barriers, registers");

  const ConvStripsParams<Traits>& p;
  Shared& smem;

  // Calls body(first pixel, first channel) for each tile of this block.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const u32 n_tiles = ceil_div(p.n, Traits::kTileN);
    const u32 pixels = static_cast<u32>(p.images) * p.lines * p.line;
    const u32 tiles = ceil_div(pixels, Traits::kTileM) * n_tiles;
    TRACEA_NO_UNROLL
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      body(static_cast<int>(tile / n_tiles * Traits::kTileM),
           static_cast<int>(tile % n_tiles * Traits::kTileN));
    }
  }

  // All rows that are computed, which are pixels of the result while they are in an image.
  TRACEA_DEVICE ConvRows rows() const {
    ConvRows rows{};
    rows.h.extent = p.lines;
    rows.w.extent = p.line;
    rows.h.out_step = rows.w.out_step = 1;
    rows.count = p.images * p.lines * p.line;
    return rows;
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      smem.strips.initialize(kTileConsumers);
      smem.weights.initialize(kTileConsumers);
      smem.finish.initialize();
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  // One thread of the block for each task.
  TRACEA_DEVICE void produce(int task) const {
    if (task == 0) {
      produce_strips();
    } else {
      produce_weights();
    }
  }

  TRACEA_DEVICE void produce_strips() const {
    StripState state;
    for_each_tile([&](int m, int) {
      TRACEA_NO_UNROLL
      for (int c = 0; c < p.channels; c += Traits::kChunk, state.advance()) {
        const u32 full = smem.strips.refill(state, Traits::kStripRows * kChunkBytes);
        TRACEA_NO_UNROLL
        for (int row = 0; row < Traits::kStripRows; row += Traits::kCopyRows) {
          const Pixel at = Pixel::at(m + row, p.lines, p.line);
          cp_async_bulk_tensor_4d_im2col(
              shared_address(smem.x[state.stage_idx]) + row * 128, p.x, c, at.column - p.left,
              at.row - p.top, at.image, 0, 0, full);
        }
      }
    });
  }

  TRACEA_DEVICE void produce_weights() const {
    WeightsState state;
    bool is_first = true;
    for_each_tile([&](int, int n) {
      if (Traits::kResident && !is_first) return;
      is_first = false;
      TRACEA_NO_UNROLL
      for (int c = 0; c < p.channels; c += Traits::kChunk) {
        TRACEA_NO_UNROLL
        for (int tap = 0; tap < kTaps; ++tap, state.advance()) {
          const u32 full = smem.weights.refill(state, Traits::kTileN * kChunkBytes);
          const u32 stage = shared_address(smem.w[state.stage_idx]);
          if constexpr (kMnMajorB) {
            TRACEA_UNROLL
            for (int slab = 0; slab < kSlabsB; ++slab) {
              cp_async_bulk_tensor_3d(stage + slab * kSlabBytesB, p.w, n + slab * kRowElements,
                                      c, tap, full);
            }
          } else {
            cp_async_bulk_tensor_3d(stage, p.w, c, n, tap, full);
          }
        }
      }
    });
  }

  // How many rows of a strip a tap's first pixel is behind that of the tile.
  TRACEA_DEVICE int distance(int i, int j) const {
    const int h = Traits::kFlips ? Traits::kTapsH - 1 - i : i;
    const int w = Traits::kFlips ? Traits::kTapsW - 1 - j : j;
    return h * Traits::kDilationH * p.line + w * Traits::kDilationW;
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = kPingPong ? 0 : consumer * kSlabs * 64;
    const u64 first_a = DescriptorA::encode(shared_address(smem.x[0]) + row * 128);
    const u64 first_b = DescriptorB::encode(shared_address(smem.w[0]));
    ConvEpilogue<Traits> epilogue =
        smem.finish.epilogue(p.epilogue, smem.buffers[consumer], consumer);
    StripState strip;
    WeightsState weights;
    bool is_first = true;  // tile, for which resident weights may still be on their way
    u32 next = 0;          // tile of this block
    for_each_tile([&](int m, int n) {
      const u32 tile = next++;
      if (kPingPong && tile % 2 != static_cast<u32>(consumer)) {
        const int chunks = ceil_div(p.channels, Traits::kChunk);
        strip.skip(chunks);
        if constexpr (!Traits::kResident) weights.skip(chunks * kTaps);
        return;
      }
      const auto corner = [&](int slab) {
        const int first = m + row + 64 * slab;
        const Pixel at = Pixel::at(first, p.lines, p.line);
        return ConvCorner{at.column, at.row, at.image, first};
      };
      epilogue.prefetch(corner, n, rows());
      if constexpr (kPingPong) smem.finish.wait_turn(consumer, tile);
      float accumulators[kSlabs][Mma::kAccumulators];  // (64, kTileN) for each slab
      int read_weights = -1, read_strip = -1;          // to release, as soon as they are read
      bool accumulate = false;
      TRACEA_NO_UNROLL
      for (int c = 0; c < p.channels; c += Traits::kChunk, strip.advance()) {
        smem.strips.wait(strip);
        const u64 a = first_a + strip.stage_idx * (Traits::kStripRows * 128 / 16);
        TRACEA_NO_UNROLL
        for (int i = 0; i < Traits::kTapsH; ++i) {
          TRACEA_NO_UNROLL
          for (int j = 0; j < Traits::kTapsW; ++j, weights.advance()) {
            if constexpr (!Traits::kResident) {
              smem.weights.wait(weights);
            } else if (is_first) {
              wait_parity(shared_address(&smem.weights.full[weights.stage_idx]), 0);
            }
            multiply_stage<Mma, DescriptorA, DescriptorB, kSteps>(
                accumulators, a + distance(i, j) * (128 / 16),
                first_b + weights.stage_idx * (Traits::kRowsB * 128 / 16), accumulate);
            accumulate = true;
            wgmma_wait_group<1>();
            if constexpr (!Traits::kResident) {
              if (read_weights >= 0) smem.weights.release(read_weights, thread);
              read_weights = weights.stage_idx;
            }
            if (read_strip >= 0) {
              smem.strips.release(read_strip, thread);
              read_strip = -1;
            }
          }
        }
        read_strip = strip.stage_idx;
      }
      if constexpr (kPingPong) smem.finish.end_turn(consumer, thread);
      wgmma_wait_group<0>();
      if constexpr (!Traits::kResident) smem.weights.release(read_weights, thread);
      smem.strips.release(read_strip, thread);
      is_first = false;
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence_operands(accumulators[slab]);
      epilogue.store(accumulators, corner, n);
    });
    epilogue.drain();
  }
};

template <class Traits>
TRACEA_DEVICE void conv2d_strips_sm90(const ConvStripsParams<Traits>& p) {
  using Kernel = ConvStrips<Traits>;
  const Kernel kernel{p, swizzled_shared<typename Kernel::Shared>()};
  kernel.initialize();
  run_roles<2, 40, 232>(kernel);
}

}  // namespace tracea
