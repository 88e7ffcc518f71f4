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
  using typename Tiles::StateQ;
  using typename Tiles::Interval;
  using Tiles::p, Tiles::smem, Tiles::kConsumers, Tiles::tile_at, Tiles::tiles, Tiles::anew,
      Tiles::interval, Tiles::blocks, Tiles::wait, Tiles::arrive_if, Tiles::place, Tiles::stage_of,
      Tiles::kQueries, Tiles::kOwnQueries;
  using Products = AttentionScores<Traits>;

  // Whether more blocks than a tile's first may be partial.
  static constexpr bool kHasPartial =
      Traits::kHasLeft || Traits::kHasRight || Traits::kKvLengths;

  // Whether blocks are short enough for a tile to see some that a consumer does not.
  static constexpr bool kSkips =
      kHasPartial && !Traits::kMapped && Traits::kTileKv + kOwnQueries <= kQueries;

  // Whether a tile is stored while the next begins: its results need a place until then.
  static constexpr bool kMayFollow = Traits::kFollows && !kSkips;

  // Whether a tile's first block may have scores that do not count.
  static constexpr bool kMasksFirst = !Traits::kWholeBlocks;

  static_assert(!Traits::kWholeBlocks || (Traits::kMapped && kMayFollow && !kHasPartial),
                "tiles of whole blocks, of a map and nothing else, follow each other");

  // Whether a tile's first block waits for a turn: where others multiply meanwhile.
  static constexpr bool kTurnsFromFirst = Traits::kPingPong && (kMayFollow || kSkips);

  const Products products;
  const AttentionResults<Traits> results;

  TRACEA_DEVICE explicit AttentionConsumer(const Tiles& tiles)
      : Tiles(tiles), products{tiles}, results{tiles} {}

  // What a consumer keeps from block to block of a tile.
  struct Progress {
    float o[Sums::kAccumulators];
    u32 weights[Products::kStepsSums][4];  // of the block before, not yet multiplied
    State keys, values;
    StateQ queries;  // the tile's
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
    products.multiply_keys(s, start, consumer, stage_of(at.queries), at.keys.stage_idx);
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

  // The first block of a tile, whose softmax has seen nothing. kFollows: while its weights are
  // computed the last ones of the tile before meet their values; `close` then stores that,
  // and sums begin anew.
  template <bool kFollows, class RulesOf, class Close>
  TRACEA_DEVICE void begin(Progress& at, OnlineSoftmax& softmax, int block, bool is_mixed,
                           u32 start, const RulesOf& rules, int consumer, int thread,
                           const Close& close) const {
    float s[Scores::kAccumulators], alpha[2];
    if constexpr (Products::kStarts) {
      products.template start_scores<kMasksFirst>(s, block, rules(), thread);
    }
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    if constexpr (kTurnsFromFirst) await_turn(consumer);
    wgmma_fence();
    products.multiply_keys(s, start, consumer, stage_of(at.queries), at.keys.stage_idx);
    if constexpr (kFollows) {
      wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
      products.multiply_values(at.o, at.weights, start, at.values.stage_idx);
    }
    if constexpr (kTurnsFromFirst) grant_turn((consumer + 1) % kConsumers);
    wgmma_wait_group<kFollows ? 1 : 0>();
    products.template take_scores<kMasksFirst>(s, at.keys, consumer, thread);
    products.template finish_scores<kMasksFirst>(s, block, is_mixed, rules, thread);
    softmax.update(s, alpha);
    if constexpr (kFollows) {
      wgmma_wait_group<0>();
      wgmma_fence_operands(at.o);
      arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
      at.values.advance();
      close();
      clear(at);
    }
    products.round_to_weights(s, at.weights);
  }

  // The last weights of a tile meet their values, where no tile follows.
  TRACEA_DEVICE void end(Progress& at, u32 start, int thread) const {
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    wgmma_fence();
    products.multiply_values(at.o, at.weights, start, at.values.stage_idx);
    wgmma_wait_group<0>();
    wgmma_fence_operands(at.o);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.values.advance();
  }

  // Passes over a block that the consumer's queries do not see, in step with the others.
  // All of the warpgroup have waited before anybody may wait for a later round.
  TRACEA_DEVICE void skip(Progress& at, int consumer, int thread) const {
    wait(smem.k_full[at.keys.stage_idx], at.keys.consumer_parity());
    if constexpr (Traits::kPingPong) {
      await_turn(consumer);
      grant_turn((consumer + 1) % kConsumers);
    }
    wait(smem.v_full[at.values.stage_idx], at.values.consumer_parity());
    meet_warpgroup(consumer);
    const int readers = Traits::kBiasTiles ? kWarpSize : kWarpgroupSize;
    arrive_if(thread % readers == 0, smem.k_empty[at.keys.stage_idx]);
    arrive_if(thread == 0, smem.v_empty[at.values.stage_idx]);
    at.keys.advance();
    at.values.advance();
  }

  // Of the blocks that the tile sees those that the consumer's queries do.
  TRACEA_DEVICE BlockRange own_blocks(const AttentionTile& tile, const Interval& keys,
                                      const BlockRange& all, int consumer) const {
    if constexpr (!kSkips) return all;
    const int first = tile.query + consumer * kOwnQueries, count = this->queries(tile);
    if (first >= count) return {all.first, all.first, all.first, all.first};
    return keys.blocks(first, min(first + kOwnQueries, count) - 1, Traits::kTileKv);
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

  TRACEA_DEVICE AttentionTile handed_over(int place) const {
    const u32 from = shared_address(&smem.tile[place]);
    u32 query, head, example;
    ld_shared(from, query);
    ld_shared(from + 4, head);
    ld_shared(from + 8, example);
    return {static_cast<int>(query), static_cast<int>(head), static_cast<int>(example)};
  }

  TRACEA_DEVICE static void clear(Progress& at) {
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) at.o[i] = 0.0f;
  }

  // A tile's queries are not needed any more; but results in place let others come only
  // when they are stored.
  TRACEA_DEVICE void release(const StateQ& queries, int thread) const {
    if constexpr (!Traits::kStagesInPlace) {
      arrive_if(thread % kWarpSize == 0, smem.q_empty[stage_of(queries)]);
    }
  }

  // A tile whose blocks the producer has found in the map. Whether there was one.
  TRACEA_DEVICE bool consume_mapped(Progress& at, OnlineSoftmax& softmax, u32 start,
                                    int consumer, int thread) const {
    const StateQ queries = at.queries;
    const int here = place(queries);
    wait(smem.q_full[stage_of(queries)], queries.consumer_parity());
    if constexpr (Traits::kStagesQ == 1) at.queries.advance();  // takes a register less
    u32 kind;
    ld_shared(shared_address(&smem.kind[here]), kind);
    if (any_lane(kind == static_cast<u32>(TileKind::kNone))) return false;
    clear(at);
    softmax.reset();
    const auto rules = [&] {
      const AttentionTile tile = handed_over(here);
      return typename Products::Rules{interval(tile), tile, tile.query + consumer * kOwnQueries};
    };
    if (any_lane(kind == static_cast<u32>(TileKind::kSees))) {
      SeenBlock seen = seen_block(at.keys);
      const bool is_mixed = any_lane(seen.is_mixed());
      begin<false>(at, softmax, seen.block(), is_mixed, start, rules, consumer, thread, [] {});
      TRACEA_NO_UNROLL
      while (!any_lane(seen.is_last())) {
        seen = seen_block(at.keys);
        if (any_lane(seen.is_full())) {
          step<false>(at, softmax, seen.block(), start, rules, consumer, thread);
        } else {
          step<true>(at, softmax, seen.block(), start, rules, consumer, thread);
        }
      }
      release(queries, thread);
      end(at, start, thread);
    } else {
      release(queries, thread);
      softmax.see_none();
    }
    const AttentionTile tile = handed_over(here);
    results.see_all(at.o, softmax, tile, tile.query + consumer * 64, thread);
    results.finish(at.o, softmax, tile, stage_of(queries), consumer, anew(thread));
    if constexpr (Traits::kStagesQ > 1) at.queries.advance();
    return true;
  }

  // A tile whose last weights have not met their values, which is not stored yet.
  struct Open {
    bool is_there = false;
    AttentionTile tile;
    StateQ queries;
  };

  // Closes a tile that no tile with keys follows.
  TRACEA_DEVICE void close(Progress& at, const OnlineSoftmax& softmax, Open& open, u32 start,
                           int consumer, int thread) const {
    if (!kMayFollow || !open.is_there) return;
    end(at, start, thread);
    results.finish(at.o, softmax, open.tile, stage_of(open.queries), consumer, anew(thread));
    open.is_there = false;
  }

  // Begins a tile with its first block, and closes the one before.
  template <class RulesOf>
  TRACEA_DEVICE void follow(Progress& at, OnlineSoftmax& softmax, const Open& open, int block,
                            u32 start, const RulesOf& rules, int consumer,
                            int thread) const {
    const OnlineSoftmax before = softmax;
    softmax.reset();
    if (open.is_there) {
      begin<true>(at, softmax, block, false, start, rules, consumer, thread, [&] {
        results.finish(at.o, before, open.tile, stage_of(open.queries), consumer,
                       anew(thread));
      });
    } else {
      clear(at);
      begin<false>(at, softmax, block, false, start, rules, consumer, thread, [] {});
    }
  }

  // A tile whose blocks the producer has found in the map, where tiles see blocks whole: no
  // score needs a look, and there are registers to store a tile while the next begins.
  // Whether there was one.
  TRACEA_DEVICE bool consume_whole(Progress& at, OnlineSoftmax& softmax, Open& open, u32 start,
                                   int consumer, int thread) const {
    const int here = place(at.queries);
    wait(smem.q_full[stage_of(at.queries)], at.queries.consumer_parity());
    u32 kind;
    ld_shared(shared_address(&smem.kind[here]), kind);
    if (any_lane(kind == static_cast<u32>(TileKind::kNone))) return false;
    const AttentionTile tile = handed_over(here);
    const auto rules = [&] {
      return typename Products::Rules{interval(tile), tile, tile.query + consumer * kOwnQueries};
    };
    if (any_lane(kind == static_cast<u32>(TileKind::kSees))) {
      SeenBlock seen = seen_block(at.keys);
      follow(at, softmax, open, seen.block(), start, rules, consumer, thread);
      TRACEA_NO_UNROLL
      while (!any_lane(seen.is_last())) {
        seen = seen_block(at.keys);
        step<false>(at, softmax, seen.block(), start, rules, consumer, thread);
      }
      release(at.queries, thread);
      open = {true, tile, at.queries};
    } else {
      release(at.queries, thread);
      close(at, softmax, open, start, consumer, thread);
      clear(at);
      softmax.see_none();
      results.see_all(at.o, softmax, tile, tile.query + consumer * 64, thread);
      results.finish(at.o, softmax, tile, stage_of(at.queries), consumer, anew(thread));
    }
    at.queries.advance();
    return true;
  }

  // Which tile is next: behind the last one if there is none.
  TRACEA_DEVICE u32 next_tile(PipelineState<2>& draw, u32 index, int thread) const {
    if constexpr (!Traits::kDraws) return index;
    wait(smem.drawn_full[draw.stage_idx], draw.consumer_parity());
    ld_shared(shared_address(&smem.drawn[draw.stage_idx]), index);
    arrive_if(thread % kWarpSize == 0, smem.drawn_empty[draw.stage_idx]);
    draw.advance();
    return warp_uniform(static_cast<int>(index));
  }

  // A tile whose blocks follow from its place.
  TRACEA_DEVICE void consume_tile(Progress& at, OnlineSoftmax& softmax, Open& open,
                                  const AttentionTile& tile, u32 start, int consumer,
                                  int thread) const {
    const Interval keys = interval(tile);
    const BlockRange seen = blocks(tile, keys);
    const BlockRange range = own_blocks(tile, keys, seen, consumer);
    const auto rules = [&] {
      return typename Products::Rules{keys, tile, tile.query + consumer * kOwnQueries};
    };
    const bool has_queries = seen.count() > 0 || Traits::kStagesInPlace;
    if (has_queries) wait(smem.q_full[stage_of(at.queries)], at.queries.consumer_parity());
    const auto skip_from = [&](int last, int first) {
      TRACEA_NO_UNROLL
      while (kSkips && last-- > first) skip(at, consumer, thread);
    };
    skip_from(seen.last, range.last);
    const auto reset = [&] {
      clear(at);
      softmax.reset();
    };
    const auto finish = [&] {
      results.finish(at.o, softmax, tile, stage_of(at.queries), consumer, anew(thread));
    };
    if constexpr (!kMayFollow) reset();
    if (range.count() > 0) {
      int block = range.last - 1;
      if constexpr (kMayFollow) {
        follow(at, softmax, open, block, start, rules, consumer, thread);
      } else {
        begin<false>(at, softmax, block, false, start, rules, consumer, thread, [] {});
      }
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
      release(at.queries, thread);
      if constexpr (kMayFollow) {
        open = {true, tile, at.queries};
      } else {
        end(at, start, thread);
      }
    } else {
      if (seen.count() > 0) release(at.queries, thread);
      if constexpr (kMayFollow) {
        close(at, softmax, open, start, consumer, thread);
        reset();
        finish();
      }
    }
    if constexpr (!kMayFollow) finish();
    skip_from(range.first, seen.first);
    if (has_queries) at.queries.advance();
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const u32 start = shared_address(smem.q[0]) / 16;
    Progress at;
    Open open;
    PipelineState<2> draw;
    OnlineSoftmax softmax(p.scale_log2);
    if constexpr (Traits::kPingPong) {
      if (consumer == kConsumers - 1) grant_turn(0);
    }
    if constexpr (Traits::kWholeBlocks) {
      TRACEA_NO_UNROLL
      while (consume_whole(at, softmax, open, start, consumer, thread)) {
      }
    } else if constexpr (Traits::kMapped) {
      TRACEA_NO_UNROLL
      while (consume_mapped(at, softmax, start, consumer, thread)) {
      }
    } else {
      u32 index = blockIdx.x;
      TRACEA_NO_UNROLL
      while ((index = next_tile(draw, index, thread)) < tiles()) {
        consume_tile(at, softmax, open, tile_at(index), start, consumer, thread);
        index += gridDim.x;
      }
    }
    close(at, softmax, open, start, consumer, thread);
    // Shared memory must outlive the copies out of it.
    if (elect_one()) cp_async_bulk_wait_group_read<0>();
  }
};

}  // namespace tracea
