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

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_im2col.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/conv_epilogue.cuh"
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
  alignas(16) float bias[Traits::kConsumers][Traits::kTileN];
  u64 full_strip[Traits::kStrips];
  u64 empty_strip[Traits::kStrips];
  u64 full_weights[Traits::kStages];
  u64 empty_weights[Traits::kStages];
  u64 residual_barriers[Traits::kConsumers][2];
  u64 turn_barriers[Traits::kConsumers];  // that a consumer has multiplied its tile
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
  static constexpr int kSteps = Traits::kChunk / 16;
  static constexpr bool kMnMajorB = !Traits::kTransB;
  static constexpr u32 kSlabBytesB = Traits::kChunk * 128;
  static constexpr int kSlabsB = ceil_div(Traits::kTileN, 64);
  using DescriptorA = OperandDescriptor<false, 0>;
  using DescriptorB = OperandDescriptor<kMnMajorB, kSlabBytesB>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kTileM == kTileConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(Mma::kN == Traits::kTileN, "one instruction spans the columns of the tile");
  static_assert(Traits::kTileN % 64 == 0 || !kMnMajorB, "whole slabs of weights");
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
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStrips; ++i) {
        mbarrier_init(shared_address(&smem.full_strip[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty_strip[i]), empty_arrivals(kTileConsumers, 1));
      }
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.full_weights[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty_weights[i]), empty_arrivals(kTileConsumers, 1));
      }
      TRACEA_UNROLL
      for (int i = 0; i < kConsumers; ++i) {
        mbarrier_init(shared_address(&smem.turn_barriers[i]), 1);
        TRACEA_UNROLL
        for (u64& barrier : smem.residual_barriers[i]) {
          mbarrier_init(shared_address(&barrier), 1);
        }
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  TRACEA_DEVICE static void wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
  }

  // One thread of the block.
  TRACEA_DEVICE void produce_strips() const {
    StripState state;
    for_each_tile([&](int m, int) {
      TRACEA_NO_UNROLL
      for (int c = 0; c < p.channels; c += Traits::kChunk, state.advance()) {
        const u32 full = shared_address(&smem.full_strip[state.stage_idx]);
        wait(shared_address(&smem.empty_strip[state.stage_idx]), state.producer_parity());
        mbarrier_arrive_expect_tx(full, Traits::kStripRows * Traits::kChunk * 2);
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

  // Another one.
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
          const u32 full = shared_address(&smem.full_weights[state.stage_idx]);
          const u32 stage = shared_address(smem.w[state.stage_idx]);
          wait(shared_address(&smem.empty_weights[state.stage_idx]), state.producer_parity());
          mbarrier_arrive_expect_tx(full, Traits::kTileN * Traits::kChunk * 2);
          if constexpr (kMnMajorB) {
            TRACEA_UNROLL
            for (int slab = 0; slab < kSlabsB; ++slab) {
              cp_async_bulk_tensor_3d(stage + slab * kSlabBytesB, p.w, n + 64 * slab, c, tap,
                                      full);
            }
          } else {
            cp_async_bulk_tensor_3d(stage, p.w, c, n, tap, full);
          }
        }
      }
    });
  }

  // Issues the products of one tap; `accumulate` is false if they overwrite.
  TRACEA_DEVICE static void multiply(float (&accumulators)[kSlabs][Mma::kAccumulators], u64 a,
                                     u64 b, bool accumulate) {
    wgmma_fence();
    TRACEA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        Mma::mma(accumulators[slab], a + slab * (64 * 128 / 16) + step * DescriptorA::kStep,
                 b + step * DescriptorB::kStep, accumulate || step != 0);
      }
    }
    wgmma_commit_group();
  }

  // How many rows of a strip a tap's first pixel is behind that of the tile.
  TRACEA_DEVICE int distance(int i, int j) const {
    const int h = Traits::kFlips ? Traits::kTapsH - 1 - i : i;
    const int w = Traits::kFlips ? Traits::kTapsW - 1 - j : j;
    return h * Traits::kDilationH * p.line + w * Traits::kDilationW;
  }

  // One thread tells the producer, as a finished wgmma is finished for the warpgroup.
  TRACEA_DEVICE static void release(u64* barriers, int stage, int thread) {
    if (thread == 0) mbarrier_arrive(shared_address(&barriers[stage]));
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = kPingPong ? 0 : consumer * kSlabs * 64;
    const u64 first_a = DescriptorA::encode(shared_address(smem.x[0]) + row * 128);
    const u64 first_b = DescriptorB::encode(shared_address(smem.w[0]));
    ConvEpilogue<Traits> epilogue(p.epilogue, shared_address(smem.buffers[consumer]),
                                  shared_address(smem.bias[consumer]),
                                  shared_address(smem.residual_barriers[consumer]), consumer);
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
      if constexpr (kPingPong) {
        wait(shared_address(&smem.turn_barriers[1 - consumer]), turn_parity(tile));
      }
      float accumulators[kSlabs][Mma::kAccumulators];  // (64, kTileN) for each slab
      int read_weights = -1, read_strip = -1;          // to release, as soon as they are read
      bool accumulate = false;
      TRACEA_NO_UNROLL
      for (int c = 0; c < p.channels; c += Traits::kChunk, strip.advance()) {
        wait(shared_address(&smem.full_strip[strip.stage_idx]), strip.consumer_parity());
        const u64 a = first_a + strip.stage_idx * (Traits::kStripRows * 128 / 16);
        TRACEA_NO_UNROLL
        for (int i = 0; i < Traits::kTapsH; ++i) {
          TRACEA_NO_UNROLL
          for (int j = 0; j < Traits::kTapsW; ++j, weights.advance()) {
            if (!Traits::kResident || is_first) {
              wait(shared_address(&smem.full_weights[weights.stage_idx]),
                   Traits::kResident ? 0 : weights.consumer_parity());
            }
            multiply(accumulators, a + distance(i, j) * (128 / 16),
                     first_b + weights.stage_idx * (Traits::kRowsB * 128 / 16), accumulate);
            accumulate = true;
            wgmma_wait_group<1>();
            if constexpr (!Traits::kResident) {
              if (read_weights >= 0) release(smem.empty_weights, read_weights, thread);
              read_weights = weights.stage_idx;
            }
            if (read_strip >= 0) {
              release(smem.empty_strip, read_strip, thread);
              read_strip = -1;
            }
          }
        }
        read_strip = strip.stage_idx;
      }
      if (kPingPong && thread == 0) {
        mbarrier_arrive(shared_address(&smem.turn_barriers[consumer]));
      }
      wgmma_wait_group<0>();
      if constexpr (!Traits::kResident) release(smem.empty_weights, read_weights, thread);
      release(smem.empty_strip, read_strip, thread);
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
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  const Kernel kernel{p, *reinterpret_cast<typename Kernel::Shared*>(smem_bytes)};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  kernel.initialize();

  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (warp == 0 && elect_one()) kernel.produce_strips();
    if (warp == 1 && elect_one()) kernel.produce_weights();
  } else {
    setmaxnreg_inc<232>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace tracea
