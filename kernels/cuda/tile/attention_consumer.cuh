// A consumer of attention_sm90: the loop over the blocks of keys of its tiles.
#pragma once

#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/turns.cuh"
#include "tile/attention_results.cuh"
#include "tile/attention_scores.cuh"
#include "tile/attention_tiles.cuh"
#include "tile/block_map.cuh"
#include "tile/online_softmax.cuh"

namespace tracea {

template <class Traits>
struct AttentionConsumer : AttentionTiles<Traits> {
  using Tiles = AttentionTiles<Traits>;
  using typename Tiles::Scores;
  using typename Tiles::Sums;
  using typename Tiles::State;
  using typename Tiles::Interval;
  using Tiles::p, Tiles::smem, Tiles::kConsumers, Tiles::tile_at, Tiles::tiles, Tiles::anew,
      Tiles::interval, Tiles::blocks, Tiles::wait, Tiles::arrive_if;
  using Products = AttentionScores<Traits>;

  // Whether more blocks than a tile's first may be partial.
  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kKvLengths;

  const Products products;
  const AttentionResults<Traits> results;

  TRACEA_DEVICE explicit AttentionConsumer(const Tiles& tiles)
      : Tiles(tiles), products{tiles}, results{tiles} {}

  // What a consumer keeps from block to block of a tile.
  struct Progress {
    float o[Sums::kAccumulators];
    u32 weights[Products::kStepsSums][4];  // of the block before, not yet multiplied
    State keys, values;
  };

  // Multiplies the queries and a block of keys, and the block before's weights and values.
  // `rules` returns them.
  template <bool kMasks, class RulesOf>
  TRACEA_DEVICE void step(Progress& at, OnlineSoftmax& softmax, int block, u32 start,
                          const RulesOf& rules, int consumer, int thread) const {
    float s[Scores::kAccumulators], alpha[2];
    if constexpr (Products::kStarts) {
      products.template start_scores<kMasks>(s, block, rules(), thread);
    }
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    if constexpr (Traits::kPingPong) await_turn(consumer);
    wgmma_fence();
    products.multiply_keys(s, start, consumer, at.keys.stage_idx);
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    products.multiply_values(at.o, at.weights, start, at.values.stage_idx);
    if constexpr (Traits::kPingPong) grant_turn((consumer + 1) % kConsumers);
    wgmma_wait_group<1>();
    products.template take_scores<kMasks>(s, at.keys, consumer, thread);
    bool is_same;
    if constexpr (Traits::kSoftCap && !kMasks) {
      is_same = softmax.update_capped(s, alpha, SoftCap{p.to_cap});
    } else {
      products.template finish_scores<kMasks>(s, block, true, rules, thread);
      is_same = softmax.template update<Traits::kBiasTiles && !kMasks>(s, alpha);
    }
    if constexpr (Traits::kOverlaps) softmax.settle();
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.o);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.values.advance();
    if (!is_same) {
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] *= alpha[i / 2 % 2];
    }
    products.round_to_weights(s, at.weights);
  }

  // The first block of a tile: there are no weights yet.
  template <class RulesOf>
  TRACEA_DEVICE void begin(Progress& at, OnlineSoftmax& softmax, int block, bool is_mixed,
                           u32 start, const RulesOf& rules, int consumer,
                           int thread) const {
    float s[Scores::kAccumulators], alpha[2];
    if constexpr (Products::kStarts) {
      products.template start_scores<true>(s, block, rules(), thread);
    }
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    wgmma_fence();
    products.multiply_keys(s, start, consumer, at.keys.stage_idx);
    wgmma_wait_group<0>();
    products.template take_scores<true>(s, at.keys, consumer, thread);
    products.template finish_scores<true>(s, block, is_mixed, rules, thread);
    softmax.update(s, alpha);
    products.round_to_weights(s, at.weights);
  }

  // The last weights of a tile meet their values.
  TRACEA_DEVICE void end(Progress& at, u32 start, int thread) const {
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    wgmma_fence();
    products.multiply_values(at.o, at.weights, start, at.values.stage_idx);
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.o);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.values.advance();
  }

  // The block whose keys come next.
  TRACEA_DEVICE SeenBlock seen_block(const State& keys) const {
    wait(smem.k_full[keys.stage_idx], keys.consumer_parity());
    u32 code;
    ld_shared(shared_address(&smem.seen[keys.stage_idx]), code);
    return {static_cast<int>(code)};
  }

  // What holds for all lanes, or for none: told so, the compiler does not let products wait
  // for each other, as it does where lanes may part.
  TRACEA_DEVICE static bool any_lane(bool holds) { return __any_sync(0xFFFFFFFFu, holds); }

  TRACEA_DEVICE AttentionTile handed_over(u32 parity) const {
    const u32 from = shared_address(&smem.tile[parity]);
    u32 query, head, example;
    ld_shared(from, query);
    ld_shared(from + 4, head);
    ld_shared(from + 8, example);
    return {static_cast<int>(query), static_cast<int>(head), static_cast<int>(example)};
  }

  // A tile whose blocks the producer has found in the map. Whether there was one.
  TRACEA_DEVICE bool consume_mapped(Progress& at, PipelineState<1>& queries_state,
                                    OnlineSoftmax& softmax, u32 start, int consumer,
                                    int thread) const {
    const u32 parity = queries_state.consumer_parity();
    wait(smem.q_full, parity);
    queries_state.advance();
    u32 kind;
    ld_shared(shared_address(&smem.kind[parity]), kind);
    if (any_lane(kind == static_cast<u32>(TileKind::kNone))) return false;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] = 0.0f;
    softmax.reset();
    const auto rules = [&] {
      const AttentionTile tile = handed_over(parity);
      return typename Products::Rules{interval(tile), tile, tile.query + consumer * 64};
    };
    // Results in place let queries come when they are stored.
    const auto release = [&] {
      if constexpr (!Traits::kStagesInPlace) {
        arrive_if(thread % kWarpSize == 0, smem.q_empty);
      }
    };
    if (any_lane(kind == static_cast<u32>(TileKind::kSees))) {
      SeenBlock seen = seen_block(at.keys);
      const bool is_mixed = any_lane(seen.is_mixed());
      begin(at, softmax, seen.block(), is_mixed, start, rules, consumer, thread);
      TRACEA_NO_UNROLL
      while (!any_lane(seen.is_last())) {
        seen = seen_block(at.keys);
        if (any_lane(seen.is_full())) {
          step<false>(at, softmax, seen.block(), start, rules, consumer, thread);
        } else {
          step<true>(at, softmax, seen.block(), start, rules, consumer, thread);
        }
      }
      release();
      end(at, start, thread);
    } else {
      release();
    }
    const AttentionTile tile = handed_over(parity);
    results.see_all(at.o, softmax, tile, tile.query + consumer * 64, thread);
    results.finish(at.o, softmax, tile, consumer, anew(thread));
    return true;
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const bool leads_warp = thread % kWarpSize == 0;
    const u32 start = shared_address(smem.q[0]) / 16;
    Progress at;
    PipelineState<1> queries_state;
    PipelineState<2> draw;
    OnlineSoftmax softmax(p.scale_log2);
    if constexpr (Traits::kPingPong) {
      if (consumer == kConsumers - 1) grant_turn(0);
    }
    if constexpr (Traits::kMapped) {
      TRACEA_NO_UNROLL
      while (consume_mapped(at, queries_state, softmax, start, consumer, thread)) {
      }
      if (elect_one()) cp_async_bulk_wait_group_read<0>();
      return;
    }
    u32 index = blockIdx.x;
    TRACEA_NO_UNROLL
    while (true) {
      if constexpr (Traits::kDraws) {
        wait(smem.drawn_full[draw.stage_idx], draw.consumer_parity());
        ld_shared(shared_address(&smem.drawn[draw.stage_idx]), index);
        index = warp_uniform(static_cast<int>(index));
        arrive_if(leads_warp, smem.drawn_empty[draw.stage_idx]);
        draw.advance();
      }
      if (index >= tiles()) break;
      const AttentionTile tile = tile_at(index);
      const Interval keys = interval(tile);
      const BlockRange range = blocks(tile, keys);
      const auto rules = [&] {
        return typename Products::Rules{keys, tile, tile.query + consumer * 64};
      };
      TRACEA_UNROLL
      for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] = 0.0f;
      softmax.reset();
      if (range.count() > 0 || Traits::kStagesInPlace) {
        wait(smem.q_full, queries_state.consumer_parity());
        queries_state.advance();
      }
      if (range.count() > 0) {
        int block = range.last - 1;
        begin(at, softmax, block, false, start, rules, consumer, thread);
        const auto masked = [&] {
          step<true>(at, softmax, block, start, rules, consumer, thread);
        };
        if constexpr (kHasPartial) {
          TRACEA_NO_UNROLL
          while (--block >= range.full_last) masked();
          ++block;
        }
        TRACEA_NO_UNROLL
        while (--block >= range.full_first) {
          step<false>(at, softmax, block, start, rules, consumer, thread);
        }
        if constexpr (Traits::kHasLeft) {
          ++block;
          TRACEA_NO_UNROLL
          while (--block >= range.first) masked();
        }
        if constexpr (!Traits::kStagesInPlace) arrive_if(leads_warp, smem.q_empty);
        end(at, start, thread);
      }
      results.finish(at.o, softmax, tile, consumer, anew(thread));
      index += gridDim.x;
    }
    // Shared memory must outlive the copies out of it.
    if (elect_one()) cp_async_bulk_wait_group_read<0>();
  }
};

}  // namespace tracea
