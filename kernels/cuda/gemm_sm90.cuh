// gemm_sm90: C[b] = epilogue(op(A[b]) @ op(B[b])) on Hopper, accumulated in f32.
//
// A persistent grid of clusters walks the output tiles. In each block one warp keeps a
// ring of stages full with tensor-map copies, and one or two warpgroups multiply from the
// ring (wgmma) and finish their own rows of the tile:
//
//            kTileN                producer:   wait empty -> expect bytes -> copy A, B
//         +----------+             consumer w: wait full -> wgmma -> arrive empty
//   64 *  | consumer | 0
//  kSlabs +----------+             A stage is A (kTileM x kTileK) and B (kTileK x kTileN),
//         | consumer | 1           each in rows of 128 swizzled bytes: along k if the
//         +----------+             operand is stored with k contiguous, else along m or n
//                                  in slabs of 64 (tensor cores read both if 16-bit).
//
// Or each consumer computes whole tiles, those of the block in turn (ping-pong). The ring
// passes from one to the other: while one finishes its tile, the other multiplies.
//
//   consumer 0:  multiply tile 0 | finish tile 0   | multiply tile 2 | ...
//   consumer 1:                  | multiply tile 1 | finish tile 1   | ...
//
// Two blocks of a cluster lie side by side along m (sharing B) or n (sharing A). Each
// copies half of the shared operand into both. Tiles past the edge of the output are
// computed on zeros and stored nowhere, so that partners always work in step.
//
// Or the kClusterK blocks of a cluster share a tile, each a range of k. Their sums meet
// through distributed shared memory, added in the order of k: results do not depend on
// which block is first. Only the tiles of the last round are shared, see tile/scheduler.cuh.
//
// A gated product y = activation(A G) * (A U) is one with B = [G, U] by half tiles. Both
// accumulators of an entry of y belong to one thread.
//
// Assumes k >= 1, every stored row of A and B a multiple of 16 bytes, and fewer than 2^31
// tiles. PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
//
//     tile/gemm_tiles.cuh      arguments, shared memory, which tiles a block computes
//     tile/gemm_producer.cuh   the copies
//     tile/gemm_consumer.cuh   the products, and their sums
//     tile/epilogue.cuh        from sums to results in memory
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/common.cuh"
#include "tile/gemm_consumer.cuh"
#include "tile/gemm_producer.cuh"
#include "tile/gemm_tiles.cuh"

namespace tracea {

template <class Traits>
TRACEA_DEVICE void gemm_sm90(const GemmSm90Params<Traits>& p) {
  using Tiles = GemmTiles<Traits>;
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  const int rank = Tiles::kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int sharer = rank % Tiles::kSharers;
  // Both roles know the tiles by this object: a copy would take registers of its own.
  const GemmConsumer<Traits> consumer{{p,
                                       *reinterpret_cast<typename Tiles::Shared*>(smem_bytes),
                                       sharer / Traits::kClusterN,
                                       sharer % Traits::kClusterN,
                                       rank / Tiles::kSharers}};
  const Tiles& tiles = consumer;
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);

  if (threadIdx.x == 0) {
    prefetch_tensormap(p.a);
    prefetch_tensormap(p.b);
    if constexpr (Traits::kHasTailB) prefetch_tensormap(p.b_tail);
    if constexpr (Traits::kGated) prefetch_tensormap(p.up);
    if constexpr (Traits::kMapsResults) prefetch_tensormap(p.epilogue.out);
    if constexpr (Traits::kMapsResidual) prefetch_tensormap(p.epilogue.residual);
  }
  tiles.initialize();

  if (warpgroup == 0) {
    if constexpr (Traits::kProducerRegisters > 0) {
      setmaxnreg_dec<Traits::kProducerRegisters>();
    }
    if (warp == 0 && elect_one()) GemmProducer<Traits>::produce(tiles);
    if (tiles.shares_tile()) {
      __syncwarp();
      cluster_barrier();  // the consumers' sums, see SplitK
    }
  } else {
    if constexpr (Traits::kConsumerRegisters > 0) {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
    }
    consumer.consume(warpgroup - 1);
  }

  // A block must outlive its partner's copies into it, arrivals at its barriers and reads
  // of its sums.
  if constexpr (Tiles::kClusterSize > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

}  // namespace tracea
