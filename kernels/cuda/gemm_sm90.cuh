// gemm_sm90: C[b] = epilogue(op(A[b]) @ op(B[b])) on Hopper, f16 or bf16 in, f32 inside.
//
// A persistent grid of clusters walks the output tiles. In each block one warp keeps a
// ring of stages full with tensor-map copies, and one or two warpgroups multiply from the
// ring (wgmma) and finish their own rows of the tile:
//
//            kTileN                producer:   wait empty -> expect bytes -> copy A, B
//         +----------+             consumer w: wait full -> wgmma -> arrive empty
//   64 *  | consumer | 0
//  kSlabs +----------+             A stage is A (kTileM x 64) and B (64 x kTileN), each in
//         | consumer | 1           rows of 128 swizzled bytes: along k if the operand is
//         +----------+             stored with k contiguous, else along m or n in slabs
//                                  of 64 (the tensor cores read both).
//
// Two blocks of a cluster lie side by side along m (sharing B) or n (sharing A). Each
// copies half of the shared operand into both. Tiles past the edge of the output are
// computed on zeros and stored nowhere, so that partners always work in step.
//
// Assumes k >= 1, every stored row of A, B and C a multiple of 16 bytes, and fewer than
// 2^31 tiles. PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/epilogue.cuh"
#include "tile/pipeline.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct GemmSm90Params {
  const TensorMap* a;
  const TensorMap* b;
  EpilogueParams epilogue;
  int m, n, k, batch;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

// One operand of one stage: kExtent rows or columns of C by 64 elements of k, copied by
// kParts blocks, each a part.
template <int kExtent, bool kMnMajor, int kParts>
struct OperandTile {
  static constexpr int kTileK = 64;
  static constexpr u32 kBytes = kExtent * 128;
  static constexpr u32 kSlabBytes = 64 * 128;  // 64 rows or columns, both majornesses
  static constexpr int kSlabs = kExtent / 64;
  // MN-major slabs are dealt out whole if that is even, else cut along k.
  static constexpr bool kWholeSlabs = kSlabs % kParts == 0;
  static constexpr int kCopies = kWholeSlabs ? kSlabs / kParts : kSlabs;
  static constexpr int kBoxK = kWholeSlabs ? kTileK : kTileK / kParts;
  static constexpr int kBoxRows = kMnMajor ? kBoxK : kExtent / kParts;
  static_assert(kExtent % 64 == 0 && kBoxRows % 8 == 0 && kBoxRows <= 256,
                "parts must be whole groups of 8 rows, in one box");

  // Copies this block's part of the tile at (mn, k) of `batch` to `smem`.
  TRACEA_DEVICE static void copy(u32 smem, const TensorMap* map, int mn, int k, int batch,
                                 u32 barrier, int part) {
    if constexpr (!kMnMajor) {
      const int row = part * kBoxRows;
      copy_box(smem + row * 128, map, k, mn + row, batch, barrier);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        const int slab = kWholeSlabs ? part * kCopies + i : i;
        const int row = kWholeSlabs ? 0 : part * kBoxK;
        copy_box(smem + slab * kSlabBytes + row * 128, map, mn + 64 * slab, k + row, batch,
                 barrier);
      }
    }
  }

  TRACEA_DEVICE static void copy_box(u32 smem, const TensorMap* map, int c0, int c1, int c2,
                                     u32 barrier) {
    if constexpr (kParts == 1) {
      cp_async_bulk_tensor_3d(smem, map, c0, c1, c2, barrier);
    } else {
      constexpr u16 kEveryBlock = (1u << kParts) - 1u;
      cp_async_bulk_tensor_3d_multicast(smem, map, c0, c1, c2, barrier, kEveryBlock);
    }
  }
};

template <class Traits>
struct GemmSm90Shared {
  alignas(1024) u8 a[Traits::kStages][Traits::kTileM * 128];
  alignas(1024) u8 b[Traits::kStages][Traits::kTileN * 128];
  alignas(1024) u8 staging[Traits::kConsumers][Traits::kEpilogueBuffers][64 * 128];
  alignas(16) float bias[Traits::kConsumers][Traits::kTileN];
  u64 full_barrier[Traits::kStages];
  u64 empty_barrier[Traits::kStages];
};

template <class Traits>
struct GemmSm90 {
  using Shared = GemmSm90Shared<Traits>;
  using Mma = typename Traits::Mma;
  using State = PipelineState<Traits::kStages>;
  using TileA = OperandTile<Traits::kTileM, Traits::kTransA, Traits::kClusterN>;
  using TileB = OperandTile<Traits::kTileN, !Traits::kTransB, Traits::kClusterM>;
  using DescriptorA = OperandDescriptor<Traits::kTransA, TileA::kSlabBytes>;
  using DescriptorB = OperandDescriptor<!Traits::kTransB, TileB::kSlabBytes>;
  using Raster = BandedRaster<Traits::kRasterBand>;

  static constexpr int kTileK = 64;
  static constexpr int kSlabs = Traits::kSlabs;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kClusterSize = Traits::kClusterM * Traits::kClusterN;
  static constexpr u32 kStageBytes = TileA::kBytes + TileB::kBytes;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize,
                "one producer warpgroup and the consumers");
  static_assert(Traits::kTileM == kConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(kConsumers <= 2 && kClusterSize <= 2, "named barriers, cluster partners");
  static_assert(Mma::kN == Traits::kTileN && Mma::kAccumulators == Traits::kTileN / 2,
                "one instruction spans the columns of the tile");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(TileA::kBoxRows == Traits::kBoxRowsA && TileB::kBoxRows == Traits::kBoxRowsB,
                "tensor maps must move exactly the boxes that are counted here");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every stage starts free");
  static_assert(empty_arrivals(kConsumers, kClusterSize) == Traits::kEmptyArrivals,
                "every consumer of the cluster releases a stage");

  const GemmSm90Params& p;
  Shared& smem;
  const int cluster_m, cluster_n;  // this block's place in its cluster

  TRACEA_DEVICE int m_clusters() const {
    return ceil_div(p.m, Traits::kTileM * Traits::kClusterM);
  }
  TRACEA_DEVICE int n_clusters() const {
    return ceil_div(p.n, Traits::kTileN * Traits::kClusterN);
  }

  // Calls body(m, n, batch) with the first row and column of each tile of this block.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const Raster raster{m_clusters(), n_clusters()};
    const u32 tiles = static_cast<u32>(p.batch) * raster.m_tiles * raster.n_tiles;
    TRACEA_NO_UNROLL
    for (u32 tile = blockIdx.x / kClusterSize; tile < tiles;
         tile += gridDim.x / kClusterSize) {
      const TileCoordinate at = raster.at(tile);
      body((at.m * Traits::kClusterM + cluster_m) * Traits::kTileM,
           (at.n * Traits::kClusterN + cluster_n) * Traits::kTileN, at.batch);
    }
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.full_barrier[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty_barrier[i]),
                      empty_arrivals(kConsumers, kClusterSize));
      }
      fence_mbarrier_init();
    }
    synchronize();
  }

  // All threads of the block, or of the cluster.
  TRACEA_DEVICE static void synchronize() {
    if constexpr (kClusterSize > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  TRACEA_DEVICE static void wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
  }

  // One thread of the block.
  TRACEA_DEVICE void produce() const {
    State state;
    const int k_tiles = ceil_div(p.k, kTileK);
    for_each_tile([&](int m, int n, int batch) {
      const int batch_a = p.a_batched ? batch : 0, batch_b = p.b_batched ? batch : 0;
      TRACEA_NO_UNROLL
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile, state.advance()) {
        const u32 full = shared_address(&smem.full_barrier[state.stage_idx]);
        wait(shared_address(&smem.empty_barrier[state.stage_idx]),
             state.producer_parity());
        // The whole stage, whichever block of the cluster copies it.
        mbarrier_arrive_expect_tx(full, kStageBytes);
        TileA::copy(shared_address(smem.a[state.stage_idx]), p.a, m, k_tile * kTileK,
                    batch_a, full, cluster_n);
        TileB::copy(shared_address(smem.b[state.stage_idx]), p.b, n, k_tile * kTileK,
                    batch_b, full, cluster_m);
      }
    });
  }

  // Tells every block that copies into the stage that this warpgroup has read it. One
  // thread may speak for all: a finished wgmma is finished for the warpgroup.
  TRACEA_DEVICE void release(const State& state, int thread) const {
    const u32 empty = shared_address(&smem.empty_barrier[state.stage_idx]);
    if constexpr (kClusterSize > 1) {
      if (thread < kClusterSize) mbarrier_arrive_cluster(empty, thread);
    } else {
      if (thread == 0) mbarrier_arrive(empty);
    }
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = consumer * kSlabs * 64;
    const u64 first_a = DescriptorA::encode(shared_address(smem.a[0]) + row * 128);
    const u64 first_b = DescriptorB::encode(shared_address(smem.b[0]));
    const int k_tiles = ceil_div(p.k, kTileK);
    WarpgroupEpilogue<Traits> epilogue(p.epilogue,
                                       shared_address(smem.staging[consumer]),
                                       shared_address(smem.bias[consumer]), consumer);
    State state;     // the stage to multiply next
    State finished;  // the oldest stage not yet released
    for_each_tile([&](int m, int n, int batch) {
      epilogue.prefetch(m + row, n, batch);
      float accumulators[kSlabs][Mma::kAccumulators];  // (64, kTileN) for each slab

      TRACEA_NO_UNROLL
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile, state.advance()) {
        wait(shared_address(&smem.full_barrier[state.stage_idx]),
             state.consumer_parity());
        const u64 stage_a = first_a + state.stage_idx * (TileA::kBytes / 16);
        const u64 stage_b = first_b + state.stage_idx * (TileB::kBytes / 16);
        wgmma_fence();
        TRACEA_UNROLL
        for (int k16 = 0; k16 < kTileK / 16; ++k16) {
          TRACEA_UNROLL
          for (int slab = 0; slab < kSlabs; ++slab) {
            // The first step of a tile overwrites the accumulators.
            Mma::mma(accumulators[slab],
                     stage_a + slab * (TileA::kSlabBytes / 16) + k16 * DescriptorA::kStep,
                     stage_b + k16 * DescriptorB::kStep, (k_tile | k16) != 0);
          }
        }
        wgmma_commit_group();
        wgmma_wait_group<Traits::kWaitDepth>();
        if (k_tile >= Traits::kWaitDepth) {
          release(finished, thread);
          finished.advance();
        }
      }
      if constexpr (Traits::kWaitDepth > 0) {
        wgmma_wait_group<0>();
        TRACEA_UNROLL
        for (int i = 0; i < Traits::kWaitDepth; ++i, finished.advance()) {
          release(finished, thread);
        }
      }
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence_operands(accumulators[slab]);

      epilogue.store(accumulators, m + row, n, batch);
    });
    epilogue.drain();
  }
};

template <class Traits>
TRACEA_DEVICE void gemm_sm90(const GemmSm90Params& p) {
  using Kernel = GemmSm90<Traits>;
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  const int rank = Kernel::kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0;
  const Kernel kernel{p, *reinterpret_cast<typename Kernel::Shared*>(smem_bytes),
                      rank / Traits::kClusterN, rank % Traits::kClusterN};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);

  if (threadIdx.x == 0) {
    prefetch_tensormap(p.a);
    prefetch_tensormap(p.b);
    prefetch_tensormap(p.epilogue.out);
    if constexpr (Traits::kSavesPreactivation) prefetch_tensormap(p.epilogue.preactivation);
  }
  kernel.initialize();

  if (warpgroup == 0) {
    if constexpr (Traits::kProducerRegisters > 0) {
      setmaxnreg_dec<Traits::kProducerRegisters>();
    }
    if (warp == 0 && elect_one()) kernel.produce();
  } else {
    if constexpr (Traits::kConsumerRegisters > 0) {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
    }
    kernel.consume(warpgroup - 1);
  }

  // A block must outlive its partner's copies into it and arrivals at its barriers.
  if constexpr (Kernel::kClusterSize > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

}  // namespace tracea
