// Gradients of queries that blocks of threads, each with its own keys, add up in memory.
//
//     dq = ds k        of a block of queries, over the keys of all tiles
//
// Two consumers compute it from ds, which both put into shared memory, keys along rows. Each
// has a part: 64 queries if the block has 128, else 64 columns. A warp adds both to the sums
// while the consumers go on:
//
//                 consumers                          a warp
//     ds      ->  both have stored theirs
//     dq part ->  staged, as registers lie      ->   added in memory, then free
//
// Sums are float32, (batch, heads, blocks, parts, 64 x 64), each part as the registers of its
// consumer lie: four of a thread are neighbours, those of all its threads follow. Who reads
// them (attention_queries_sums.cuh) has threads that lie alike.
//
// In no order (kOrdered false) sums must begin with zeros, and their last bits depend on which
// tile of keys comes first. In order, tiles of keys come one after the other, the first one
// stores: `turns` counts those that did, for each block. Who waits for a turn waits for tiles
// of threads that were launched before.
#pragma once

#include "ptx/bulk_add.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_operands.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/segment_map.cuh"

namespace tracea {

constexpr int kPartFloats = 64 * 64;  // of sums, of one consumer
constexpr u32 kPartBytes = 4 * kPartFloats;

// Whose part is staged: a head of those that share the keys, and a block of queries.
struct alignas(8) AttentionPartPlace {
  int head, block;
};

// What the warps that add dq know of the tile.
struct AttentionAdding {
  int count;          // of parts
  int blocks, first;  // of queries of a head; those of the heads before
  int tile;           // of keys
  const SegmentSpan *of_queries, *of_keys;  // of the example
};

// Of what is shared; nothing if nothing is added.
template <class Traits, bool kAdds = Traits::kAdds>
struct AttentionSumsShared {};

template <class Traits>
struct AttentionSumsShared<Traits, true> {
  static constexpr int kSlabs = ceil_div(Traits::kBlockQ, 64);
  alignas(1024) u8 ds[2][kSlabs][Traits::kTileKv * 128];
  alignas(1024) u8 parts[2][kPartBytes];
  u64 full[2], empty;  // of even and odd blocks; of both parts
  AttentionPartPlace place[2];
  AttentionAdding adding;
};

template <class Traits>
struct AttentionSums {
  using Product = typename Traits::Dq;
  using Shared = AttentionSumsShared<Traits>;
  static constexpr int kSlabs = Shared::kSlabs, kTileKv = Traits::kTileKv;
  static constexpr bool kPartsAreRows = kSlabs == 2;
  static constexpr u32 kSlabBytes = kTileKv * 128;
  using Rows = OperandDescriptor<true, kSlabBytes>;

  static_assert(kTileKv == 128, "two consumers");
  static_assert(Traits::kBlockQ == 128 ? Traits::kSlabs == 1 : Traits::kBlockQ == 64,
                "a part is 64 queries and 64 columns");
  static_assert(kPartsAreRows || Traits::kSlabs == 2, "two parts");
  static_assert(Product::kN == 64 && Product::kAccumulators == 32, "columns of a part");

  TRACEA_DEVICE static void initialize(Shared& shared) {
    TRACEA_UNROLL
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), 2 * kWarpgroupSize / kWarpSize);
    }
    mbarrier_init(shared_address(&shared.empty), 1);
  }

  // Puts a consumer's ds, keys along rows, where both find it. Buffers take turns: the other
  // one is read until all consumers have come here again.
  template <int kSteps>
  TRACEA_DEVICE static void share(Shared& shared, int buffer, const u32 (&ds)[kSteps][4],
                                  int consumer, int thread) {
    const u32 to = shared_address(shared.ds[buffer]) + consumer * 64 * 128;
    TRACEA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      stmatrix_x4(to + step / 4 * kSlabBytes +
                      stmatrix_x4_byte<typename Traits::Swizzle>(thread, 2 * step % 8),
                  ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
    fence_proxy_async_shared();
  }

  // c = the consumer's part of ds k, not waited for; k is the tile of keys at `keys`.
  TRACEA_DEVICE static void multiply(float (&c)[32], const Shared& shared, int buffer,
                                     u32 keys, int consumer) {
    const u32 part = consumer * (kSlabBytes / 16);
    const u32 a = shared_address(shared.ds[buffer]) / 16 + (kPartsAreRows ? part : 0);
    const u32 b = keys + (kPartsAreRows ? 0 : part);
    TRACEA_UNROLL
    for (int step = 0; step < kTileKv / 16; ++step) {
      Product::mma(c, descriptor_at<Rows>(a + step * Rows::kStep),
                   descriptor_at<Rows>(b + step * Rows::kStep), step != 0);
    }
    wgmma_commit_group();
  }

  // Hands a part to the warp that adds it; blocks are even or odd.
  TRACEA_DEVICE static void stage(Shared& shared, const float (&c)[32],
                                  AttentionPartPlace place, int odd, int consumer,
                                  int thread) {
    while (!mbarrier_try_wait_parity(shared_address(&shared.empty), odd ^ 1)) {
    }
    const u32 to = shared_address(shared.parts[consumer]) + 16 * thread;
    TRACEA_UNROLL
    for (int i = 0; i < 8; ++i) {
      st_shared(to + 16 * kWarpgroupSize * i,
                Quad{{c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3]}});
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (elect_one()) {
      if (consumer == 0 && thread < kWarpSize) shared.place[odd] = place;  // all have the same
      mbarrier_arrive(shared_address(&shared.full[odd]));
    }
  }

  // Adds the parts of a block to the sums; after `turn` others if they are ordered. One thread.
  TRACEA_DEVICE static void add(Shared& shared, float* sums, int* turns, int index, int turn) {
    const u32 from = shared_address(shared.parts);
    float* const to = sums + static_cast<i64>(index) * 2 * kPartFloats;
    if constexpr (Traits::kOrdered) {
      while (ld_acquire(turns + index) != turn) {
      }
      fence_proxy_async_global();
    }
    if (Traits::kOrdered && turn == 0) {
      cp_async_bulk_store(to, from, 2 * kPartBytes);
    } else {
      cp_reduce_async_bulk_add(to, from, 2 * kPartBytes);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
    mbarrier_arrive(shared_address(&shared.empty));
    if constexpr (Traits::kOrdered) {
      cp_async_bulk_wait_group_all();
      fence_proxy_async_global();
      add_release(turns + index, 1);
    }
  }
};

}  // namespace tracea
