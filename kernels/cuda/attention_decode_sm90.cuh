// attention_decode_sm90: attention of few queries to many keys, on Hopper, at the rate at
// which memory delivers keys and values.
//
//   sums, totals = softmax step by step, as attention_sm90, of a part of the keys
//
// The heads that share keys, and all queries, are rows of one tile, so that keys and values
// are read once: row r is head r % group of query r / group. 64 rows are what an instruction
// multiplies at least; warps without rows skip the softmax.
//
// The blocks of kTileKv keys that a sequence has are dealt out to thread blocks in equal,
// contiguous parts. If there is one part, it writes the result; else each writes its
// sums, not yet divided, with maximum and total of their weights, and attention_combine.cuh
// adds them up.
//
//     sequence 0   [=====0=====)[=====1=====)[====2====)      three parts
//     sequence 1   [==0==)[==1==)[==2=)
//     sequence 2   [0][1]                                     part 2 is empty
//
// A thread block takes part blockIdx.x of the order of parts, and those gridDim.x further on,
// if there are more parts than thread blocks; the copies of one follow those of the other.
//
// One warp copies blocks of keys and values by tensor map into one ring of slots, one
// warpgroup multiplies. Of a block that a sequence does not fill only the rows that it has
// are copied, kFewRows at a time; the rest of the values is set to zero in shared memory: a
// weight of zero does not make up for a NaN.
//
// Keys lie in memory as (rows, kv_heads, sequences), or (kPaged) in pages: page i of a
// sequence is pages[i] of all, and has page_rows rows. A page that a sequence does not reach
// is not looked at.
//
// A query that sees no key takes the mean of all values, see tile/key_range.cuh, but of a
// paged sequence without keys the result is zero.
//
//     tile/decode_parts.cuh      arguments, shared memory, what a thread block computes
//     tile/decode_producer.cuh   the copies
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_operands.cuh"
#include "tile/common.cuh"
#include "tile/decode_parts.cuh"
#include "tile/decode_producer.cuh"
#include "tile/fragment.cuh"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

template <class Traits>
struct DecodeConsumer : DecodeParts<Traits> {
  using Parts = DecodeParts<Traits>;
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;  // q k'
  using Sums = typename Traits::Sums;      // p v
  using typename Parts::Keys;
  using typename Parts::Part;
  using typename Parts::Queries;
  using typename Parts::State;
  using Parts::p, Parts::smem, Parts::kTileKv, Parts::kSlabs, Parts::part_at, Parts::wait;

  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kStepsSums = kTileKv / 16;  // of 16 keys

  static_assert(kTileKv % 16 == 0 && kTileKv <= 256, "keys in one box, steps of 16");
  static_assert(Scores::kN == kTileKv && Sums::kN == kHeadDim, "one instruction a step");

  TRACEA_DEVICE void consume() const {
    State state;
    PipelineState<1> queries_state;
    TRACEA_NO_UNROLL
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Part own = part_at(index);
      const bool has_keys = own.first < own.last;
      if (has_keys) wait(smem.q_full, queries_state.consumer_parity());
      attend(own, state);
      if (has_keys) queries_state.advance();
    }
  }

  TRACEA_DEVICE void attend(const Part& own, State& state) const {
    const int thread = static_cast<int>(threadIdx.x);
    const u32 start = shared_address(smem.q[0]) / 16, slots = start + Queries::kUnits;
    const int rows = own.queries * p.group;
    const bool has_rows = warp_uniform(thread / kWarpSize) * 16 < rows;
    int query[2];  // of the thread's two rows
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      query[half] = own.query + wgmma_accumulator_row(thread, 2 * half) / p.group;
    }
    float o[Sums::kAccumulators];
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) o[i] = 0.0f;
    OnlineSoftmax softmax(p.scale_log2);
    TRACEA_NO_UNROLL
    for (int block = own.first; block < own.last; ++block) {
      float s[Scores::kAccumulators];
      u32 weights[kStepsSums][4];
      const int keys = state.stage_idx;
      wait(smem.full[keys], state.consumer_parity());
      state.advance();
      wgmma_fence();
      multiply_columns<Scores, Queries, Keys>(s, start, slots + keys * Keys::kUnits);
      wgmma_wait_group<0>();
      wgmma_fence_operands(s);
      if (thread == 0) {
        mbarrier_arrive(shared_address(&smem.empty[keys]));
        if (block == own.last - 1) mbarrier_arrive(shared_address(&smem.q_empty));
      }
      if (has_rows) {
        float alpha[2];
        if (!own.range.is_full(block)) mask(s, block, own, query, thread);
        if (!softmax.update(s, alpha)) {
          TRACEA_UNROLL
          for (int i = 0; i < Sums::kAccumulators; ++i) o[i] *= alpha[i / 2 % 2];
        }
      }
      round_to_weights(s, weights);
      const int values = state.stage_idx;
      wait(smem.full[values], state.consumer_parity());
      state.advance();
      if (own.rows_of(block) < kTileKv) clear_values(values, own.rows_of(block), thread);
      wgmma_fence();
      multiply_rows<Sums, Keys>(o, weights, slots + values * Keys::kUnits);
      wgmma_wait_group<0>();
      wgmma_fence_operands(o);
      if (thread == 0) mbarrier_arrive(shared_address(&smem.empty[values]));
    }
    if (has_rows) finish(o, softmax, own, query, rows, thread);
  }

  // Scores of keys that a query must not see, and of keys that do not exist.
  TRACEA_DEVICE void mask(float (&s)[Scores::kAccumulators], int block, const Part& own,
                          const int (&query)[2], int thread) const {
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    const int stored = p.kv_len - first;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int position = query[half] + own.shift;
      const int begin = own.keys.begin(position) - first, end = own.keys.end(position) - first;
      TRACEA_UNROLL
      for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
        TRACEA_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int column = 8 * (i / 4) + j;
          const bool is_seen = column < end && (!Traits::kHasLeft || column >= begin);
          const float unseen = column < stored ? kMasked : kNoKey;
          s[i + j] = is_seen ? s[i + j] : unseen;
        }
      }
    }
  }

  // Zeros in the place of values from row `rows` on.
  TRACEA_DEVICE void clear_values(int slot, int rows, int thread) const {
    const int count = (kTileKv - rows) * 128 / 16;
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      const u32 start = shared_address(smem.slots[slot][slab]) + rows * 128;
      TRACEA_NO_UNROLL
      for (int i = thread; i < count; i += kWarpgroupSize) {
        st_shared(start + i * 16, Quad{});
      }
    }
    fence_proxy_async_shared();
    meet_warpgroup(0);
  }

  TRACEA_DEVICE static void round_to_weights(const float (&s)[Scores::kAccumulators],
                                             u32 (&weights)[kStepsSums][4]) {
    TRACEA_UNROLL
    for (int step = 0; step < kStepsSums; ++step) {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int first = 8 * step + 2 * i;
        weights[step][i] = Packed<Element>::from({s[first], s[first + 1]}).bits;
      }
    }
  }

  TRACEA_DEVICE void finish(const float (&o)[Sums::kAccumulators],
                            const OnlineSoftmax& softmax, const Part& own,
                            const int (&query)[2], int rows, int thread) const {
    const int column = wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = wgmma_accumulator_row(thread, 2 * half);
      const float total = softmax.total(half);
      if (row >= rows) continue;
      const int head = own.kv_head * p.group + row - (query[half] - own.query) * p.group;
      const i64 at = (static_cast<i64>(own.example) * p.q_len + query[half]) * p.heads + head;
      if constexpr (Traits::kSplits) {
        const i64 part = at * p.splits + own.split;
        if (own.first < own.last) {
          float* to = p.sums + part * kHeadDim + column;
          TRACEA_UNROLL
          for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
            *reinterpret_cast<float2*>(to + 2 * i - 4 * half) = {o[i], o[i + 1]};
          }
        }
        if (thread % 4 == 0) {
          const float most = own.first < own.last ? softmax.most(half) : kNoKey;
          *reinterpret_cast<float2*>(p.totals + part * 2) = {most, total};
        }
      } else {
        const bool has_keys = own.first < own.last;
        const float factor = has_keys ? 1.0f / total : 0.0f;  // of -inf for all keys 1 / 0
        Element* to = static_cast<Element*>(p.o) + at * kHeadDim + column;
        TRACEA_UNROLL
        for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
          *reinterpret_cast<u32*>(to + 2 * i - 4 * half) =
              Packed<Element>::from({o[i] * factor, o[i + 1] * factor}).bits;
        }
        if constexpr (Traits::kSavesLse) {
          const i64 place =
              (static_cast<i64>(own.example) * p.heads + head) * p.q_len + query[half];
          const bool has_seen = softmax.has_seen(half) && total != 0.0f;
          const float lse = log_sum_exp(softmax.most(half), total, has_seen);
          if (thread % 4 == 0) p.lse[place] = lse;
        }
      }
    }
  }
};

template <class Traits>
TRACEA_DEVICE void attention_decode_sm90(const AttentionDecodeSm90Params& p) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  using Parts = DecodeParts<Traits>;
  const Parts parts{p, *reinterpret_cast<typename Parts::Shared*>(smem_bytes)};
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == Traits::kThreads - 1) {
    prefetch_tensormap(p.q);
    prefetch_tensormap(p.k);
    prefetch_tensormap(p.v);
  }
  parts.initialize();
  if (warp == kWarpgroupSize / kWarpSize) {
    if (elect_one()) DecodeProducer<Traits>{parts}.produce();
  } else {
    DecodeConsumer<Traits>{parts}.consume();
  }
}

}  // namespace tracea
