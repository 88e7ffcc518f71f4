// attention_sm90: o = softmax(scale q k' , where allowed) v for each head, on Hopper.
//
// A block computes tiles of kTileQ queries of one head, one after another. One warp copies
// queries, and blocks of kTileKv keys and values into two rings, by tensor map. Each of the
// consumers, a warpgroup, owns 64 of the queries:
//
//   for each block of keys, the last first:
//     s = q k'          (tensor cores, q and k from shared memory)
//     p = softmax step of s, rounded to the operands' dtype
//     o = alpha o + p v (tensor cores, p from registers, v from shared memory)
//
// Within a consumer (kOverlaps) the product p v of one block runs during the softmax of the
// next:
//
//   issue s' = q k'[n-1] | issue o += p v[n] | s' done: softmax of s' | o done: o *= alpha
//
// Between consumers (kPingPong) a turn goes round: who has it issues its two products, and
// passes it on before its softmax. While one is at its softmax, the other multiplies.
//
// Which blocks a tile sees follows from positions and lengths, see tile/key_range.cuh, and
// (kMapped) from a map of segments and masks, see tile/block_map.cuh: both roles compute it
// from the same numbers. A tile past its example's queries sees none, and is zeros.
//
// A query that sees no key takes the mean of all values. With a map nobody knows until the
// end which queries do: then they read all values.
//
// A bias is copied in tiles, beside the keys, and added to scale s; one that is shared by
// queries or keys, or cannot be copied so, is read from memory as bias / scale, from which s
// starts. So it does from ALiBi's bias, which is computed. With a cap s becomes
// tanh(scale s / cap), which softmax scales with the cap. A sink is a weight more in the
// rows' totals.
//
// A block takes tile blockIdx.x of the order of tiles, and the next ones gridDim.x further
// on, or (kDraws) the next that no block has drawn, from a counter that is zero when the
// kernel starts. Results do not depend on who computes a tile.
//
// Sums are divided by the rows' totals at the end: until then they may be 2^kSlack kv_len
// times as large as the values, and overflow where those are almost the largest f32.
//
// A head is kHeadDim columns of queries and keys, kValueDim of values, in slabs of 64: 128
// swizzled bytes a row. What the last slab has more is read as zeros. PTX ISA:
// "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
//
//     tile/attention_tiles.cuh      arguments, shared memory, what a tile sees by its place
//     tile/attention_producer.cuh   the copies
//     tile/attention_consumer.cuh   the loop over blocks of keys
//     tile/attention_scores.cuh     the products, and scores as softmax takes them
//     tile/attention_results.cuh    from sums to results in memory
#pragma once

#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "tile/attention_consumer.cuh"
#include "tile/attention_producer.cuh"
#include "tile/attention_tiles.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Traits>
TRACEA_DEVICE void attention_sm90(const AttentionSm90Params& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  using Tiles = AttentionTiles<Traits>;
  const Tiles tiles{p, *reinterpret_cast<typename Tiles::Shared*>(smem_bytes)};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == 0) {
    prefetch_tensormap(p.q);
    prefetch_tensormap(p.k);
    prefetch_tensormap(p.v);
    prefetch_tensormap(p.o);
  }
  tiles.initialize();
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (warp == 0 && elect_one()) AttentionProducer<Traits>{tiles}.produce();
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    AttentionConsumer<Traits>(tiles).consume(warpgroup - 1);
  }
}

}  // namespace tracea
