// conv2d_sm90: a convolution of NHWC images, or the gradient of its input, on Hopper:
// y = epilogue(sum over taps of pixels @ weights), accumulated in f32.
//
// An implicit product. Its rows are the pixels of the result, its columns the channels, and
// its k runs over the filter's taps and, inside a tap, over chunks of channels:
//
//            kTileN                producer:   wait empty -> expect bytes -> copy A, B
//         +----------+             consumer w: wait full -> wgmma -> arrive empty
//   64 *  | consumer | 0
//  kSlabs +----------+             A stage is A, kTileM pixels as a tap sees them by one
//         | consumer | 1           chunk of channels, copied by an im2col tensor map, and B,
//         +----------+             the tap's weights of that chunk by kTileN channels.
//
// Rows of A are 128 swizzled bytes along the chunk, of which a narrower chunk fills the
// first. B is stored along k (rows like A's) or along n (slabs of 64 columns).
//
// Or each consumer computes whole tiles, those of the block in turn (ping-pong): while one
// finishes its tile, the other multiplies.
//
// Two blocks of a cluster compute neighbours along the pixels. Each copies half of the
// weights into both. A tile past the last pixel is computed on zeros and stored nowhere, so
// that partners always work in step.
//
// A persistent grid walks the tiles. The gradient of a strided convolution's input has
// phases, the pixels that the same taps reach; their tiles follow one another, and a phase
// without taps is zeros. See tile/conv_axis.cuh.
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
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct ConvSm90Params {
  // Of each phase, the row's number first.
  const TensorMap* a[Traits::kPhasesH][Traits::kPhasesW];
  const TensorMap* b;
  const TensorMap* b_tail;  // copies what a last slab of B begins with, if it ends early
  ConvEpilogueParams<Traits> epilogue;
  int images, n, channels;  // n channels of the result, and those that are summed over
  int kernel_width;
  ConvAxis h[Traits::kPhasesH], w[Traits::kPhasesW];
};

template <class Traits>
struct ConvSm90Shared {
  alignas(1024) u8 a[Traits::kStages][Traits::kTileM * 128];
  alignas(1024) u8 b[Traits::kStages][Traits::kRowsB * 128];
  alignas(1024) u8 buffers[Traits::kConsumers][Traits::kBuffers][64 * 128];
  RingBarriers<Traits::kStages> ring;
  ConvFinishShared<Traits> finish;
};

// What a block computes at a time.
struct ConvWork {
  const TensorMap* a;
  ConvRows rows;
  int m, n;  // first pixel and channel
};

template <class Traits>
struct ConvSm90 {
  using Shared = ConvSm90Shared<Traits>;
  using Mma = typename Traits::Mma;
  using State = PipelineState<Traits::kStages>;
  using Raster = BandedRaster<Traits::kRasterBand>;

  static constexpr int kRowElements = 128 / Traits::kElementBytes;
  static constexpr int kSteps = Traits::kChunk * Traits::kElementBytes / 32;  // of a stage
  static constexpr int kSlabs = Traits::kSlabs;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kPingPong = Traits::kPingPong;
  static constexpr int kTileConsumers = kPingPong ? 1 : kConsumers;  // that share a tile
  static constexpr int kCluster = Traits::kCluster;
  static constexpr bool kMnMajorB = !Traits::kTransB;
  // Rows of 128 bytes of the weights, in one slab, that a block copies.
  static constexpr int kCopiedRowsB =
      (kMnMajorB ? Traits::kChunk : Traits::kTileN) / Traits::kCluster;
  static constexpr u32 kSlabBytesB = Traits::kChunk * 128;  // of an MN-major tile
  static constexpr int kSlabsB = ceil_div(Traits::kTileN, kRowElements);
  static constexpr bool kHasTailB = kMnMajorB && Traits::kTileN % kRowElements != 0;
  using DescriptorA = OperandDescriptor<false, 0>;
  using DescriptorB = OperandDescriptor<kMnMajorB, kSlabBytesB>;
  static constexpr u32 kCopiedBytes =
      (Traits::kTileM + Traits::kTileN) * Traits::kChunk * Traits::kElementBytes;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize,
                "one producer warpgroup and the consumers");
  static_assert(Traits::kTileM == kTileConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(!kPingPong || kConsumers == 2, "two consumers take turns");
  static_assert(kConsumers <= 3, "named barriers");
  static_assert(kCluster <= 2 && kCopiedRowsB % 8 == 0, "halves begin as a swizzle does");
  static_assert(Mma::kN == Traits::kTileN, "one instruction spans the columns of the tile");
  static_assert(Traits::kChunk <= kRowElements && kSteps * 32 == Traits::kChunk *
                                                                     Traits::kElementBytes,
                "a chunk is whole steps, in one row");
  static_assert(kMnMajorB ? Traits::kElementBytes == 2 &&
                                Traits::kRowsB == kSlabsB * Traits::kChunk
                          : Traits::kRowsB == Traits::kTileN,
                "the tensor cores read only 16-bit operands along n, in slabs");
  static_assert(Traits::kHasTailB == kHasTailB, "a narrow slab has a map of its own");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every stage starts free");

  const ConvSm90Params<Traits>& p;
  Shared& smem;
  const int rank;  // of this block in its cluster

  TRACEA_DEVICE ConvRows rows_of(int phase_h, int phase_w) const {
    ConvRows rows{p.h[0], p.w[0], 0};
    if constexpr (Traits::kPhasesH > 1) {
      if (phase_h == 1) rows.h = p.h[1];
    }
    if constexpr (Traits::kPhasesW > 1) {
      if (phase_w == 1) rows.w = p.w[1];
    }
    rows.count = p.images * rows.h.extent * rows.w.extent;
    return rows;
  }

  // Calls body(work) for each tile of this block.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const int n_tiles = ceil_div(p.n, Traits::kTileN);
    u32 tile = blockIdx.x / kCluster, before = 0;
    TRACEA_UNROLL
    for (int i = 0; i < Traits::kPhasesH; ++i) {
      TRACEA_UNROLL
      for (int j = 0; j < Traits::kPhasesW; ++j) {
        const ConvRows rows = rows_of(i, j);
        const Raster raster{ceil_div(rows.count, Traits::kTileM * kCluster), n_tiles};
        const u32 tiles = static_cast<u32>(raster.m_tiles) * n_tiles;
        TRACEA_NO_UNROLL
        for (; tile < before + tiles; tile += gridDim.x / kCluster) {
          const TileCoordinate at = raster.at(tile - before);
          body(ConvWork{p.a[i][j], rows, (at.m * kCluster + rank) * Traits::kTileM,
                        at.n * Traits::kTileN});
        }
        before += tiles;
      }
    }
  }

  TRACEA_DEVICE int chunks() const { return ceil_div(p.channels, Traits::kChunk); }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      smem.ring.initialize(kTileConsumers, kCluster);
      smem.finish.initialize();
      fence_mbarrier_init();
    }
    if constexpr (kCluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  // One thread of the block.
  TRACEA_DEVICE void produce(int) const {
    State state;
    for_each_tile([&](const ConvWork& work) {
      const ConvAxis &h = work.rows.h, &w = work.rows.w;
      const Pixel at = Pixel::at(work.m, h.extent, w.extent);
      const int row = h.position(at.row), column = w.position(at.column);
      TRACEA_NO_UNROLL
      for (int i = 0; i < h.taps; ++i) {
        TRACEA_NO_UNROLL
        for (int j = 0; j < w.taps; ++j) {
          const int tap = h.tap(i) * p.kernel_width + w.tap(j);
          TRACEA_NO_UNROLL
          for (int c = 0; c < p.channels; c += Traits::kChunk, state.advance()) {
            const u32 full = smem.ring.refill(state, kCopiedBytes);
            cp_async_bulk_tensor_4d_im2col(shared_address(smem.a[state.stage_idx]), work.a, c,
                                           column, row, at.image,
                                           static_cast<u16>(w.offset(j)),
                                           static_cast<u16>(h.offset(i)), full);
            copy_weights(shared_address(smem.b[state.stage_idx]), work.n, c, tap, full);
          }
        }
      }
    });
  }

  // This block's part of the weights, which all blocks of the cluster need.
  TRACEA_DEVICE void copy_weights(u32 stage, int n, int c, int tap, u32 full) const {
    const int first = rank * kCopiedRowsB;
    stage += first * 128;
    if constexpr (kMnMajorB) {
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabsB; ++slab) {
        copy_box(stage + slab * kSlabBytesB,
                 kHasTailB && slab == kSlabsB - 1 ? p.b_tail : p.b, n + slab * kRowElements,
                 c + first, tap, full);
      }
    } else {
      copy_box(stage, p.b, c, n + first, tap, full);
    }
  }

  TRACEA_DEVICE static void copy_box(u32 destination, const TensorMap* map, int c0, int c1,
                                     int c2, u32 full) {
    if constexpr (kCluster > 1) {
      cp_async_bulk_tensor_3d_multicast(destination, map, c0, c1, c2, full,
                                        static_cast<u16>((1 << kCluster) - 1));
    } else {
      cp_async_bulk_tensor_3d(destination, map, c0, c1, c2, full);
    }
  }

  // Tells every block that copies into the stage that this consumer has read it.
  TRACEA_DEVICE void release(const State& state, int thread) const {
    if constexpr (kCluster > 1) {
      const u32 empty = shared_address(&smem.ring.empty[state.stage_idx]);
      if (thread < kCluster) mbarrier_arrive_cluster(empty, thread);
    } else {
      smem.ring.release(state.stage_idx, thread);
    }
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = kPingPong ? 0 : consumer * kSlabs * 64;
    const u64 first_a = DescriptorA::encode(shared_address(smem.a[0]) + row * 128);
    const u64 first_b = DescriptorB::encode(shared_address(smem.b[0]));
    ConvEpilogue<Traits> epilogue =
        smem.finish.epilogue(p.epilogue, smem.buffers[consumer], consumer);
    State state;     // the stage to multiply next
    State finished;  // the oldest stage not yet released
    u32 next = 0;    // tile of this block
    for_each_tile([&](const ConvWork& work) {
      const u32 tile = next++;
      const auto corner = [&](int slab) {
        return ConvCorner{work.m + row + 64 * slab, 0, 0, work.m + row + 64 * slab};
      };
      const int steps = work.rows.h.taps * work.rows.w.taps * chunks();
      if (kPingPong && tile % 2 != static_cast<u32>(consumer)) {
        state.skip(steps);
        finished = state;
        return;
      }
      epilogue.prefetch(corner, work.n, work.rows);
      if constexpr (kPingPong) smem.finish.wait_turn(consumer, tile);
      float accumulators[kSlabs][Mma::kAccumulators];  // (64, kTileN) for each slab
      if constexpr (Traits::kPhasesH * Traits::kPhasesW > 1) {
        if (steps == 0) {
          fill_zero(accumulators);
          // Products keep the warps of a consumer together. Without any, the first of them
          // could end turns while the last still waits for its own, whose parity then passes
          // by twice and is waited for without end.
          if constexpr (kPingPong) warpgroup_barrier(consumer);
        }
      }
      TRACEA_NO_UNROLL
      for (int k = 0; k < steps; ++k, state.advance()) {
        smem.ring.wait(state);
        multiply_stage<Mma, DescriptorA, DescriptorB, kSteps>(
            accumulators, first_a + state.stage_idx * (Traits::kTileM * 128 / 16),
            first_b + state.stage_idx * (Traits::kRowsB * 128 / 16), k != 0);
        wgmma_wait_group<Traits::kWaitDepth>();
        if (k >= Traits::kWaitDepth) {
          release(finished, thread);
          finished.advance();
        }
      }
      if constexpr (kPingPong) smem.finish.end_turn(consumer, thread);
      if constexpr (Traits::kWaitDepth > 0) {
        wgmma_wait_group<0>();
        TRACEA_UNROLL
        for (int i = 0; i < Traits::kWaitDepth; ++i) {
          if (i >= steps) break;
          release(finished, thread);
          finished.advance();
        }
      }
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence_operands(accumulators[slab]);
      epilogue.store(accumulators, corner, work.n);
    });
    epilogue.drain();
  }

  TRACEA_DEVICE static void fill_zero(float (&sums)[kSlabs][Mma::kAccumulators]) {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      TRACEA_UNROLL
      for (int i = 0; i < Mma::kAccumulators; ++i) sums[slab][i] = 0.0f;
    }
  }
};

template <class Traits>
TRACEA_DEVICE void conv2d_sm90(const ConvSm90Params<Traits>& p) {
  using Kernel = ConvSm90<Traits>;
  const int rank = Kernel::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const Kernel kernel{p, swizzled_shared<typename Kernel::Shared>(), rank};
  kernel.initialize();
  run_roles<1, Traits::kProducerRegisters, Traits::kConsumerRegisters>(kernel);

  // A block must outlive its partner's copies into it, and arrivals at its barriers.
  if constexpr (Kernel::kCluster > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

}  // namespace tracea
