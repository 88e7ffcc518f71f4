// What both roles of gemm_sm90 share: the arguments, the layout of shared memory with its
// barriers, and the tiles that a block computes.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/common.cuh"
#include "tile/epilogue_bias.cuh"
#include "tile/epilogue_residual.cuh"
#include "tile/epilogue_tiles.cuh"
#include "tile/operand_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct GemmSm90Params {
  const TensorMap* a;
  const TensorMap* b;
  const TensorMap* b_tail;  // copies what a last slab of B begins with, if it ends early
  const TensorMap* up;  // the second right operand of a gated product, else null
  EpilogueParams<Traits> epilogue;
  int m, n, k, batch;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

template <class Traits>
struct GemmSm90Shared {
  alignas(1024) u8 a[Traits::kStages][Traits::kParts * Traits::kRowsA * 128];
  alignas(1024) u8 b[Traits::kStages][Traits::kParts * Traits::kRowsB * 128];
  alignas(1024) u8 staging[Traits::kConsumers][Traits::kEpilogueBuffers][64 * 128];
  alignas(16) float bias[Traits::kConsumers][EpilogueBias<Traits>::kColumns];
  u64 full_barrier[Traits::kStages];
  u64 empty_barrier[Traits::kStages];
  // Of each consumer: that it has multiplied, a phase for each tile of ping-pong, then those
  // of the copies of the residual.
  u64 consumer_barriers[Traits::kConsumers]
                       [1 + EpilogueResidual<Traits>::kCopies];
};

// What a block computes at a time: the tile whose first row and column are (m, n), or of it
// the sum over a part of k, as its cluster shares the tile.
struct Work {
  int m, n, batch;
  int first_k_tile, last_k_tile;  // [first, last)
  bool is_shared;
};

template <class Traits>
struct GemmTiles {
  using Shared = GemmSm90Shared<Traits>;
  using State = PipelineState<Traits::kStages>;
  // Columns of B that come from one array: those of C, as a gated product has two.
  static constexpr int kArraysB = Traits::kGated ? 2 : 1;
  static constexpr int kColumns = Traits::kTileN / kArraysB;
  using TileA =
      OperandTile<Traits::kTileM, Traits::kTransA, Traits::kElementBytes, Traits::kClusterN,
                  Traits::kRowsA>;
  using TileB =
      OperandTile<kColumns, !Traits::kTransB, Traits::kElementBytes, Traits::kClusterM>;
  using Raster = BandedRaster<Traits::kRasterBand>;
  using Deal = TileDeal<Traits::kClusterM * Traits::kClusterN, Traits::kClusterK>;

  static constexpr int kTileK = 128 / Traits::kElementBytes;
  static constexpr int kParts = Traits::kParts;
  static constexpr int kSlabs = Traits::kSlabs;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kPingPong = Traits::kPingPong;
  static constexpr int kTileConsumers = kPingPong ? 1 : kConsumers;  // that share a tile
  static constexpr int kSharers = Traits::kClusterM * Traits::kClusterN;
  static constexpr int kClusterSize = kSharers * Traits::kClusterK;
  // Who says that a stage was read: each warp that loaded fragments of it, or one thread of
  // a warpgroup, as a finished wgmma is finished for all of it.
  static constexpr int kReaders = Traits::kFragmentsA ? kWarpgroupSize / kWarpSize : 1;
  // What is copied into a stage, whichever block of the cluster copies it.
  static constexpr u32 kCopiedBytes =
      kParts * (TileA::kCopiedBytes + kArraysB * TileB::kCopiedBytes);

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize,
                "one producer warpgroup and the consumers");
  static_assert(Traits::kTileM == kTileConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(!kPingPong || (kConsumers == 2 && Traits::kClusterK == 1),
                "two consumers take turns, at tiles that are their own");
  static_assert(kConsumers <= 2 && kSharers <= 2, "named barriers, cluster partners");
  static_assert(kSharers == 1 || Traits::kClusterK == 1, "a cluster shares k or operands");
  static_assert(kArraysB * TileB::kBytes == Traits::kRowsB * 128,
                "the ring must hold what is copied");
  static_assert(!TileA::kHasTail && TileB::kHasTail == Traits::kHasTailB,
                "slabs of B may end early, and then have a tensor map of their own");
  static_assert(!Traits::kGated || kColumns % 64 == 0, "two operands lie slab by slab");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(Traits::kElementBytes == 2 ||
                    (Traits::kTransA == Traits::kFragmentsA && Traits::kTransB),
                "the tensor cores read only 16-bit operands along m or n");
  static_assert(TileA::kBoxRows == Traits::kBoxRowsA && TileB::kBoxRows == Traits::kBoxRowsB,
                "tensor maps must move exactly the boxes that are counted here");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every stage starts free");
  static_assert(empty_arrivals(kTileConsumers * kReaders, kSharers) == Traits::kEmptyArrivals,
                "every consumer that shares a stage releases it");

  const GemmSm90Params<Traits>& p;
  Shared& smem;
  const int cluster_m, cluster_n, cluster_k;  // this block's place in its cluster

  TRACEA_DEVICE int m_clusters() const {
    return ceil_div(p.m, Traits::kTileM * Traits::kClusterM);
  }
  TRACEA_DEVICE int n_clusters() const {
    return ceil_div(p.n, kColumns * Traits::kClusterN);
  }

  // The clusters' tiles of C in all batches.
  TRACEA_DEVICE u32 tiles() const {
    return static_cast<u32>(p.batch) * m_clusters() * n_clusters();
  }

  TRACEA_DEVICE Deal deal() const { return Deal{tiles(), gridDim.x}; }

  // Whether the last round leaves this block's cluster a tile to share.
  TRACEA_DEVICE bool shares_tile() const { return deal().shares_tile(blockIdx.x); }

  // Calls body(work) for each piece of work of this block.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const Raster raster{m_clusters(), n_clusters()};
    const int k_tiles = ceil_div(p.k, kTileK);
    TRACEA_NO_UNROLL
    for (u32 first = 0; first < tiles(); first += deal().round()) {
      const u32 tile = deal().tile(first, blockIdx.x);
      if (tile >= tiles()) break;
      const TileCoordinate at = raster.at(tile);
      const bool is_shared = deal().is_shared(first);
      const int parts = is_shared ? Traits::kClusterK : 1, part = is_shared ? cluster_k : 0;
      body(Work{(at.m * Traits::kClusterM + cluster_m) * Traits::kTileM,
                (at.n * Traits::kClusterN + cluster_n) * kColumns, at.batch,
                k_tile_bound(k_tiles, part, parts), k_tile_bound(k_tiles, part + 1, parts),
                is_shared});
    }
  }

  // Where part `part` of `parts` equal ones begins.
  TRACEA_DEVICE static int k_tile_bound(int k_tiles, int part, int parts) {
    if constexpr (Traits::kClusterK == 1) return part * k_tiles;
    return static_cast<int>(static_cast<i64>(k_tiles) * part / parts);
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.full_barrier[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty_barrier[i]),
                      empty_arrivals(kTileConsumers * kReaders, kSharers));
      }
      TRACEA_UNROLL
      for (int i = 0; i < kConsumers; ++i) {
        TRACEA_UNROLL
        for (u64& barrier : smem.consumer_barriers[i]) {
          mbarrier_init(shared_address(&barrier), 1);
        }
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
};

}  // namespace tracea
