// Sums of one tile that the blocks of a cluster computed over different ranges of k.
//
//   all blocks:  publish: accumulators -> own shared memory | cluster barrier
//   block r:     gather: for the entries that are its share, the sum over the blocks in
//                their order, read from each one's shared memory
//
// A thread finds its own entries of all blocks at its own place, as it holds the same ones
// in each: neighbours read neighbouring 16 bytes. Every block publishes one tile only, its
// last one.
#pragma once

#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"

namespace tracea {

template <int kBlocks, int kConsumers, int kSlabs, int kAccumulators>
class SplitK {
 public:
  static constexpr int kQuads = kAccumulators / 4;  // of a thread in one slab
  static constexpr int kBytes =
      16 * kQuads * kSlabs * kConsumers * kWarpgroupSize;
  static_assert(kAccumulators % 4 == 0, "entries are exchanged by four");

  // `buffer` is free once all consumers of the block have finished multiplying.
  TRACEA_DEVICE SplitK(u32 buffer, int rank, int consumer, int thread)
      : rank_(rank),
        first_(buffer + 16 * (consumer * kSlabs * kQuads * kWarpgroupSize + thread)) {}

  TRACEA_DEVICE void publish(const float (&accumulators)[kSlabs][kAccumulators]) const {
    consumers_barrier<kConsumers * kWarpgroupSize>();
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      TRACEA_UNROLL
      for (int quad = 0; quad < kQuads; ++quad) {
        const float* v = accumulators[slab] + 4 * quad;
        st_shared(address(slab, quad), Quad{{v[0], v[1], v[2], v[3]}});
      }
    }
    cluster_barrier();
  }

  // Whether the unit of work of this number is this block's.
  TRACEA_DEVICE bool owns(int unit) const { return unit % kBlocks == rank_; }

  // Registers first .. first + count - 1 of a slab, summed over the blocks; multiples of 4.
  TRACEA_DEVICE void gather(float (&accumulators)[kAccumulators], int slab, int first,
                            int count) const {
    TRACEA_UNROLL
    for (int i = first; i < first + count; i += 4) {
      Quad parts[kBlocks];
      TRACEA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        parts[block] = ld_shared_cluster(cluster_address(address(slab, i / 4), block));
      }
      TRACEA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float sum = parts[0].x[j];
        TRACEA_UNROLL
        for (int block = 1; block < kBlocks; ++block) sum += parts[block].x[j];
        accumulators[i + j] = sum;
      }
    }
  }

 private:
  TRACEA_DEVICE u32 address(int slab, int quad) const {
    return first_ + 16 * kWarpgroupSize * (slab * kQuads + quad);
  }

  const int rank_;
  const u32 first_;
};

}  // namespace tracea
