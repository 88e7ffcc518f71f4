// The end of a tile of attention_sm90: sums of a consumer's rows become results, which are
// stored.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/turns.cuh"
#include "tile/attention_tiles.cuh"
#include "tile/fragment.cuh"
#include "tile/online_softmax.cuh"
#include "tile/score_bias.cuh"

namespace tracea {

template <class Traits>
struct AttentionResults : AttentionTiles<Traits> {
  using Tiles = AttentionTiles<Traits>;
  using typename Tiles::Sums;
  using Tiles::p, Tiles::smem, Tiles::kValueDim, Tiles::kValueSlabs, Tiles::kSlabBytesQ,
      Tiles::queries, Tiles::kPacked, Tiles::kOwnQueries;
  static constexpr int kBlocks = kValueDim / 8;  // of 8 columns of o

  // Queries that have seen no key take the mean of all values: read here, by each warp for
  // its rows. A lane adds up its columns of every eighth key.
  TRACEA_DEVICE void see_all(float (&o)[Sums::kAccumulators], OnlineSoftmax& softmax,
                             const AttentionTile& tile, int first, int thread) const {
    constexpr int kTogether = 4;  // blocks of columns
    constexpr int kAhead = 4;     // keys of a lane whose values are on their way
    using Element = typename Traits::Element;
    bool is_blind[2];
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first + wgmma_accumulator_row(thread, 2 * half);
      is_blind[half] = softmax.is_blind(half) && row < queries(tile);
    }
    if (!__any_sync(0xFFFFFFFFu, is_blind[0] || is_blind[1])) return;
    const int kv_heads = p.heads / p.group, lane = thread % kWarpSize;
    const i64 row = static_cast<i64>(kv_heads) * kValueDim;
    const Element* values = static_cast<const Element*>(p.values) +
                            static_cast<i64>(tile.example) * p.kv_len * row +
                            tile.head / p.group * kValueDim +
                            wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; block += kTogether) {
      float sum[2 * kTogether] = {};
      TRACEA_NO_UNROLL
      for (int key = lane / 4; key < p.kv_len; key += 8 * kAhead) {
        Packed<Element> v[kAhead][kTogether];
        TRACEA_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          TRACEA_UNROLL
          for (int i = 0; i < kTogether; ++i) {
            const Element* at = values + (key + 8 * j) * row + 8 * (block + i);
            const bool exists = block + i < kBlocks && key + 8 * j < p.kv_len;
            v[j][i].bits = exists ? load_constant(reinterpret_cast<const u32*>(at)) : 0u;
          }
        }
        TRACEA_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          TRACEA_UNROLL
          for (int i = 0; i < kTogether; ++i) {
            sum[2 * i] += v[j][i].widen().x;
            sum[2 * i + 1] += v[j][i].widen().y;
          }
        }
      }
      TRACEA_UNROLL
      for (int i = 0; i < 2 * kTogether; ++i) {
        if (block + i / 2 >= kBlocks) break;
        TRACEA_UNROLL
        for (int far = 4; far < kWarpSize; far *= 2) {
          sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], far);
        }
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float& found = o[4 * (block + i / 2) + 2 * half + i % 2];
          found = is_blind[half] ? sum[i] : found;
        }
      }
    }
    softmax.see_all(is_blind, p.kv_len);
  }

  // Divides by the rows' totals and stores the consumer's rows, each warp its own.
  TRACEA_DEVICE void finish(float (&o)[Sums::kAccumulators], const OnlineSoftmax& softmax,
                            const AttentionTile& tile, int stage_q, int consumer,
                            int thread) const {
    const int first = tile.query + consumer * kOwnQueries;
    const int count = queries(tile);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int place = wgmma_accumulator_row(thread, 2 * half);
      const int row = first + place / kPacked, head = tile.head + place % kPacked;
      const bool is_query = row < count;
      float total = softmax.total(half), most = softmax.most(half), factor = 1.0f / total;
      if constexpr (Traits::kSinks) {
        add_sink(p.sinks[head], most, total, factor);
      }
      const bool has_seen = softmax.has_seen(half) || most > softmax.most(half);
      TRACEA_UNROLL
      for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
        o[i] = is_query ? o[i] * factor : 0.0f;
        o[i + 1] = is_query ? o[i + 1] * factor : 0.0f;
      }
      if constexpr (Traits::kSavesLse) {
        const i64 at = (static_cast<i64>(tile.example) * p.heads + head) * p.q_len + row;
        const float value = is_query ? log_sum_exp(most, total, has_seen) : kMaskedByJax;
        if (thread % 4 == 0 && row < p.q_len) p.lse[at] = value;
      }
    }
    stage(o, stage_q, consumer, thread);
    store(tile, first, stage_q, consumer, thread);
  }

  TRACEA_DEVICE u32 staging(int stage_q, int consumer) const {
    const u8* start = smem.staging;
    if constexpr (Traits::kStagesInPlace) start = smem.q[stage_q][0];
    return shared_address(start) + consumer * 64 * 128;
  }

  // Rounds the consumer's results into shared memory, laid out as its queries.
  TRACEA_DEVICE void stage(const float (&o)[Sums::kAccumulators], int stage_q, int consumer,
                           int thread) const {
    if constexpr (Traits::kStagesInPlace) {
      meet_warpgroup(consumer);  // all of it have multiplied their queries
    } else {
      if (elect_one()) cp_async_bulk_wait_group_read<0>();  // the tile's before
      __syncwarp();
    }
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; block += 2) {
      u32 packed[4];
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * block + 2 * i;
        packed[i] = at < Sums::kAccumulators
                        ? Packed<typename Traits::Element>::from({o[at], o[at + 1]}).bits
                        : 0u;
      }
      stmatrix_x4(staging(stage_q, consumer) + block / 8 * kSlabBytesQ +
                      stmatrix_x4_byte<typename Traits::Swizzle>(thread, block % 8),
                  packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async_shared();
    __syncwarp();
  }

  // Stores the 16 rows of this warp, of the consumer's from row `first` on.
  TRACEA_DEVICE void store(const AttentionTile& tile, int first, int stage_q, int consumer,
                           int thread) const {
    const int row = thread / kWarpSize * 16;
    if (!elect_one()) return;
    // Where heads are packed they come before queries in the map.
    const int query = first + row / kPacked;
    const int second = kPacked > 1 ? tile.head : query;
    const int third = kPacked > 1 ? query : tile.head;
    TRACEA_UNROLL
    for (int slab = 0; slab < kValueSlabs; ++slab) {
      cp_async_bulk_tensor_4d_store(p.o,
                                    staging(stage_q, consumer) + slab * kSlabBytesQ + row * 128,
                                    slab * 64, second, third, tile.example);
    }
    cp_async_bulk_commit_group();
    if constexpr (Traits::kStagesInPlace) {
      cp_async_bulk_wait_group_read<0>();
      mbarrier_arrive(shared_address(&smem.q_empty[stage_q]));
    }
  }
};

}  // namespace tracea
