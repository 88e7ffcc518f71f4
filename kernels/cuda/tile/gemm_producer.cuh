// The producer of gemm_sm90: one thread, which keeps the ring full with the operands of the
// tiles that the block computes.
#pragma once

#include "tile/gemm_tiles.cuh"

namespace tracea {

template <class Traits>
struct GemmProducer {
  using Tiles = GemmTiles<Traits>;
  using TileA = typename Tiles::TileA;
  using TileB = typename Tiles::TileB;

  TRACEA_DEVICE static void produce(const Tiles& tiles) {
    typename Tiles::State state;
    tiles.for_each_tile([&](const Work& work) {
      TRACEA_NO_UNROLL
      for (int k_tile = work.first_k_tile; k_tile < work.last_k_tile;
           ++k_tile, state.advance()) {
        const u32 full = shared_address(&tiles.smem.full_barrier[state.stage_idx]);
        Tiles::wait(shared_address(&tiles.smem.empty_barrier[state.stage_idx]),
             state.producer_parity());
        mbarrier_arrive_expect_tx(full, Tiles::kCopiedBytes);
        fill(tiles, state.stage_idx, work.m, work.n, k_tile * Tiles::kTileK, work.batch, full);
      }
    });
  }

  // Parts of an operand lie one after another, each with all of its batches.
  TRACEA_DEVICE static void fill(const Tiles& tiles, int stage, int m, int n, int k,
                                 int batch, u32 full) {
    const auto& p = tiles.p;
    u32 a = shared_address(tiles.smem.a[stage]), b = shared_address(tiles.smem.b[stage]);
    int batch_a = p.a_batched ? batch : 0, batch_b = p.b_batched ? batch : 0;
    TRACEA_UNROLL
    for (int part = 0; part < Tiles::kParts; ++part) {
      TileA::copy(a, p.a, nullptr, m, k, batch_a, full, tiles.cluster_n);
      TileB::copy(b, p.b, p.b_tail, n, k, batch_b, full, tiles.cluster_m);
      if constexpr (Traits::kGated) {
        TileB::copy(b + TileB::kBytes, p.up, nullptr, n, k, batch_b, full, tiles.cluster_m);
      }
      a += TileA::kBytes;
      b += Tiles::kArraysB * TileB::kBytes;
      batch_a += p.a_batched ? p.batch : 1;
      batch_b += p.b_batched ? p.batch : 1;
    }
  }
};

}  // namespace tracea
