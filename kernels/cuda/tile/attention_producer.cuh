// The producer of attention_sm90: one thread, which copies queries, and blocks of keys and
// values into rings, for each tile that the block computes.
#pragma once

#include "ptx/shared_store.cuh"
#include "tile/attention_tiles.cuh"
#include "tile/block_map.cuh"

namespace tracea {

template <class Traits>
struct AttentionProducer : AttentionTiles<Traits> {
  using Tiles = AttentionTiles<Traits>;
  using typename Tiles::State;
  using typename Tiles::StateQ;
  using Tiles::p, Tiles::smem, Tiles::kTileKv, Tiles::kSlabs, Tiles::kValueSlabs,
      Tiles::kSlabBytesQ, Tiles::kSlabBytesKv, Tiles::kBiasBytes, Tiles::tile_at,
      Tiles::tiles, Tiles::anew, Tiles::interval, Tiles::blocks, Tiles::map_of, Tiles::wait,
      Tiles::bias_tile, Tiles::place, Tiles::stage_of,
      Tiles::kPacked;
  using Walk = typename Choose<Traits::kMapped, MapWalk, RangeWalk>::Type;

  // Whether the consumers wait for the queries of a tile that sees no block: in their place
  // they stage zeros, and with a map they do not know.
  static constexpr bool kAnnouncesBlind = Traits::kStagesInPlace || Traits::kMapped;

  // Whether keys are a block ahead of values from tile to tile, too: those of a tile's first
  // block, and its queries, then come before the last values of the tile before, for which
  // there is room later. A second place for queries is free by then.
  static constexpr bool kStreams = Traits::kStagesQ > 1 && Traits::kStreams;

  // The last block of a tile, whose keys are on their way and whose values are not.
  struct Behind {
    int block = -1, head, example;
  };

  TRACEA_DEVICE void produce() const {
    State keys, values;
    StateQ queries;
    PipelineState<2> draw;
    Behind behind;
    u32 index = blockIdx.x;
    TRACEA_NO_UNROLL
    while (true) {
      u32 next = index + gridDim.x;
      if constexpr (Traits::kDraws) {
        if constexpr (!Traits::kMapped) {
          wait(smem.drawn_empty[draw.stage_idx], draw.producer_parity());
          st_shared(shared_address(&smem.drawn[draw.stage_idx]), index);
          mbarrier_arrive(shared_address(&smem.drawn_full[draw.stage_idx]));
          draw.advance();
        }
        if (index < tiles()) next = gridDim.x + atomicAdd(p.counter, 1u);
      }
      if (index >= tiles()) break;
      const AttentionTile tile = tile_at(index);
      const BlockRange range = blocks(tile, interval(tile));
      Walk walk(map_of(tile), range);
      if (walk.next()) {
        produce_tile(tile, walk, keys, values, queries, behind);
      } else {
        // Who meets a tile without keys stores the one before.
        if constexpr (kStreams) copy_behind(behind, values);
        if constexpr (kAnnouncesBlind) {
          mbarrier_arrive(hand_over(tile, TileKind::kBlind, queries));
        }
      }
      index = next;
    }
    if constexpr (kStreams) copy_behind(behind, values);
    if constexpr (Traits::kMapped) {
      mbarrier_arrive(hand_over({0, 0, 0}, TileKind::kNone, queries));
    }
  }

  // With a map consumers learn from the producer what tile is next: they have no registers
  // to find out. Queries may be copied when it returns: their barrier.
  TRACEA_DEVICE u32 hand_over(const AttentionTile& tile, TileKind kind,
                              StateQ& state) const {
    const int stage = stage_of(state);
    wait(smem.q_empty[stage], state.producer_parity());
    if constexpr (Traits::kMapped) {
      const u32 to = shared_address(&smem.tile[place(state)]);
      st_shared(to, static_cast<u32>(tile.query));
      st_shared(to + 4, static_cast<u32>(tile.head));
      st_shared(to + 8, static_cast<u32>(tile.example));
      st_shared(shared_address(&smem.kind[place(state)]), static_cast<u32>(kind));
    }
    state.advance();
    return shared_address(&smem.q_full[stage]);
  }

  TRACEA_DEVICE void copy_queries(const AttentionTile& tile, StateQ& queries) const {
    const int stage = stage_of(queries);
    const u32 full = hand_over(tile, TileKind::kSees, queries);
    mbarrier_arrive_expect_tx(full, kSlabs * kSlabBytesQ);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      // Where heads are packed they come before queries in the map.
      const int second = kPacked > 1 ? tile.head : tile.query;
      const int third = kPacked > 1 ? tile.query : tile.head;
      cp_async_bulk_tensor_4d(shared_address(smem.q[stage][slab]), p.q, slab * 64, second,
                              third, tile.example, full);
    }
  }

  // The walk stands at the tile's first block.
  TRACEA_DEVICE void produce_tile(const AttentionTile& tile, Walk& walk, State& keys,
                                  State& values, StateQ& queries, Behind& behind) const {
    const int kv_head = tile.head / anew(p.group);
    int block = walk.block();
    bool has_more = copy_keys(walk, kv_head, tile, keys);
    copy_queries(tile, queries);
    if constexpr (kStreams) copy_behind(behind, values);
    TRACEA_NO_UNROLL
    while (has_more) {
      const int later = walk.block();
      has_more = copy_keys(walk, kv_head, tile, keys);
      copy_values(block, kv_head, tile.example, values);
      block = later;
    }
    if constexpr (kStreams) {
      behind = {block, kv_head, tile.example};
    } else {
      copy_values(block, kv_head, tile.example, values);
    }
  }

  // Copies the keys of the block that the walk stands at, and goes to the next.
  TRACEA_DEVICE bool copy_keys(Walk& walk, int head, const AttentionTile& tile,
                               State& state) const {
    const int stage = state.stage_idx, block = walk.block();
    const bool is_mixed = walk.is_mixed(), is_full = walk.is_full();
    const bool has_more = walk.next();
    wait(smem.k_empty[stage], state.producer_parity());
    state.advance();
    if constexpr (Traits::kMapped) {
      const int code = SeenBlock::of(block, is_mixed, is_full, !has_more).code;
      st_shared(shared_address(&smem.seen[stage]), static_cast<u32>(code));
    }
    copy_block<kSlabs, kBiasBytes>(smem.k[stage][0], p.k, block, head, tile.example,
                                   smem.k_full[stage]);
    if constexpr (Traits::kBiasTiles) copy_bias(block, tile, stage);
    return has_more;
  }

  TRACEA_DEVICE void copy_values(int block, int head, int example, State& state) const {
    const int stage = state.stage_idx;
    wait(smem.v_empty[stage], state.producer_parity());
    state.advance();
    copy_block<kValueSlabs, 0>(smem.v[stage][0], p.v, block, head, example,
                               smem.v_full[stage]);
  }

  // The values of the last block of the tile before, unless they are on their way.
  TRACEA_DEVICE void copy_behind(Behind& behind, State& state) const {
    if (behind.block >= 0) copy_values(behind.block, behind.head, behind.example, state);
    behind.block = -1;
  }

  // The bias of the tile's queries and a block of keys, in slabs of 64 keys.
  TRACEA_DEVICE void copy_bias(int block, const AttentionTile& tile, int stage) const {
    const int head = Traits::kBiasHeads ? tile.head : 0;
    const int example = Traits::kBiasExamples ? tile.example : 0;
    TRACEA_UNROLL
    for (int slab = 0; slab < Traits::kBiasSlabs; ++slab) {
      cp_async_bulk_tensor_4d(bias_tile(stage) + slab * kSlabBytesQ, p.bias_tiles,
                              block * kTileKv + slab * 64, tile.query, head, example,
                              shared_address(&smem.k_full[stage]));
    }
  }

  // kMore: bytes of other copies that the barrier waits for.
  template <int kCount, u32 kMore>
  TRACEA_DEVICE static void copy_block(const u8* to, const TensorMap* map, int block,
                                       int head, int example, const u64& barrier) {
    const u32 full = shared_address(&barrier);
    mbarrier_arrive_expect_tx(full, kCount * kSlabBytesKv + kMore);
    TRACEA_UNROLL
    for (int slab = 0; slab < kCount; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(to) + slab * kSlabBytesKv, map, slab * 64,
                              block * kTileKv, head, example, full);
    }
  }
};

}  // namespace tracea
