// The producer of attention_decode_sm90: one thread, which copies queries, and blocks of keys
// and values into one ring of slots, for each part that the thread block computes.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma_4d.cuh"
#include "tile/decode_parts.cuh"

namespace tracea {

template <class Traits>
struct DecodeProducer : DecodeParts<Traits> {
  using Parts = DecodeParts<Traits>;
  using typename Parts::Part;
  using typename Parts::State;
  using Parts::p, Parts::smem, Parts::kTileKv, Parts::kSlabs, Parts::part_at, Parts::wait;
  static constexpr int kBoxRows = Traits::kBoxRows, kFewRows = Traits::kFewRows;

  static_assert(kTileKv % kBoxRows == 0 && kBoxRows % kFewRows == 0 && kFewRows % 8 == 0,
                "boxes fill a block, and begin where the swizzle does");

  TRACEA_DEVICE void produce() const {
    State state;
    PipelineState<1> queries_state;
    TRACEA_NO_UNROLL
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Part own = part_at(index);
      if (own.first == own.last) continue;
      wait(smem.q_empty, queries_state.producer_parity());
      queries_state.advance();
      copy_queries(own);
      TRACEA_NO_UNROLL
      for (int block = own.first; block < own.last; ++block) {
        if (own.rows_of(block) == kTileKv) {
          copy_block<kBoxRows>(own, block, kTileKv, p.k, p.v, state);
        } else {
          copy_block<kFewRows>(own, block, own.rows_of(block), p.k_few, p.v_few, state);
        }
      }
    }
  }

  TRACEA_DEVICE void copy_queries(const Part& own) const {
    const u32 full = shared_address(&smem.q_full);
    mbarrier_arrive_expect_tx(full, kSlabs * p.queries * p.group * 128);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(smem.q[slab]), p.q, slab * 64,
                              own.kv_head * p.group, own.query, own.example, full);
    }
  }

  // Copies `rows` keys, rounded up to boxes of kRows, and as many values.
  template <int kRows>
  TRACEA_DEVICE void copy_block(const Part& own, int block, int rows, const TensorMap* k,
                                const TensorMap* v, State& state) const {
    constexpr int kBoxes = kTileKv / kRows;
    const int boxes = ceil_div(rows, kRows);
    int row[kBoxes], where[kBoxes];
    TRACEA_UNROLL
    for (int i = 0; i < kBoxes; ++i) {
      row[i] = block * kTileKv + i * kRows;
      where[i] = own.example;
      if constexpr (Traits::kPaged) {
        const i64 page = row[i] / p.page_rows;
        row[i] -= static_cast<int>(page) * p.page_rows;
        if (i < boxes) where[i] = p.pages[own.example * static_cast<i64>(p.page_count) + page];
      }
    }
    const TensorMap* maps[2] = {k, v};
    TRACEA_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int slot = state.stage_idx;
      wait(smem.empty[slot], state.producer_parity());
      state.advance();
      const u32 full = shared_address(&smem.full[slot]);
      mbarrier_arrive_expect_tx(full, kSlabs * kRows * 128 * boxes);
      TRACEA_UNROLL
      for (int i = 0; i < kBoxes; ++i) {
        if (i >= boxes) break;
        TRACEA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          cp_async_bulk_tensor_4d_hinted(
              shared_address(smem.slots[slot][slab]) + i * kRows * 128, maps[side],
              slab * 64, row[i], own.kv_head, where[i], full, evict_first_policy());
        }
      }
    }
  }
};

}  // namespace tracea
