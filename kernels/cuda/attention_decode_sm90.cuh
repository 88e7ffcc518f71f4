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
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/key_parts.cuh"
#include "tile/key_range.cuh"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct AttentionDecodeSm90Params {
  const TensorMap* q;              // (head_dim, heads, q_len, batch), innermost first
  const TensorMap *k, *v;          // (head_dim, rows, kv_heads, sequences or pages)
  const TensorMap *k_few, *v_few;  // the same in boxes of kFewRows
  void* o;                         // (batch, q_len, heads, head_dim)
  float* lse;                      // (batch, heads, q_len); null unless it is saved
  float* sums;                     // (batch, q_len, heads, splits, head_dim), or null
  float* totals;                   // (batch, q_len, heads, splits, 2), or null
  const int* kv_lengths;           // (batch), or null
  const int* pages;                // (batch, pages of a sequence), or null
  int q_len, kv_len, heads, group;
  int left, right;                 // of the window; not looked at if there is no limit
  int items;                       // parts of all tiles of all heads of all sequences
  int splits;                      // parts that the keys of a sequence are dealt out to
  int queries;                     // of a tile: group times as many are 64 rows at most
  int page_rows, page_count;       // of a page; of a sequence
  float scale_log2;                // scale log2(e)
};

template <class Traits>
struct AttentionDecodeSm90Shared {
  alignas(1024) u8 q[Traits::kSlabs][64 * 128];
  alignas(1024) u8 slots[Traits::kSlots][Traits::kSlabs][Traits::kTileKv * 128];
  u64 q_full, q_empty;
  u64 full[Traits::kSlots], empty[Traits::kSlots];
};

template <class Traits>
struct AttentionDecodeSm90 {
  using Shared = AttentionDecodeSm90Shared<Traits>;
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;  // q k'
  using Sums = typename Traits::Sums;      // p v
  using State = PipelineState<Traits::kSlots>;
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;
  using DescriptorQ = OperandDescriptor<false, 0>;
  using DescriptorK = OperandDescriptor<false, 0>;
  using DescriptorV = OperandDescriptor<true, Traits::kTileKv * 128>;

  static constexpr int kTileKv = Traits::kTileKv, kSlabs = Traits::kSlabs;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kBoxRows = Traits::kBoxRows, kFewRows = Traits::kFewRows;
  static constexpr int kStepsScores = ceil_div(kHeadDim, 16);  // of 16 of the head
  static constexpr int kStepsSums = kTileKv / 16;              // of 16 keys
  static constexpr u32 kSlabBytesQ = 64 * 128, kSlabBytesKv = kTileKv * 128;
  // Distances in a descriptor's unit of 16 bytes, from the start of the queries.
  static constexpr u32 kUnitsToSlots = kSlabs * kSlabBytesQ / 16;
  static constexpr u32 kSlotUnits = kSlabs * kSlabBytesKv / 16;
  static constexpr int kLongest = 1 << 30;  // lengths that may be added without overflow

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == kWarpgroupSize + kWarpSize,
                "a warpgroup multiplies, a warp copies");
  static_assert(kHeadDim % 8 == 0 && kSlabs == ceil_div(kHeadDim, 64), "slabs of 64");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256, "keys in one box, steps of 16");
  static_assert(kTileKv % kBoxRows == 0 && kBoxRows % kFewRows == 0 && kFewRows % 8 == 0,
                "boxes fill a block, and begin where the swizzle does");
  static_assert(Scores::kN == kTileKv && Sums::kN == kHeadDim, "one instruction a step");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::q) == kUnitsToSlots * 16, "slots follow the queries");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every slot starts free");

  const AttentionDecodeSm90Params& p;
  Shared& smem;

  // One part of one tile, that a thread block computes at a time, and both roles know.
  struct Work {
    int example, kv_head, split;
    int query, queries;  // the first query, and how many there are
    int shift;           // from a query's number to its position
    Interval keys;
    BlockRange range;    // that its sequence has; of them ...
    int first, last;     // ... those of this part
    int end;             // of the keys that any query sees, or takes the mean of

    TRACEA_DEVICE int rows_of(int block) const {
      return min(kTileKv, end - block * kTileKv);
    }
  };

  // Heads come first, then parts: neighbours read neighbouring memory.
  TRACEA_DEVICE Work work(int index) const {
    const int kv_heads = p.heads / p.group;
    int rest = index;
    Work w;
    w.kv_head = rest % kv_heads;
    rest /= kv_heads;
    w.split = rest % p.splits;
    rest /= p.splits;
    const int tiles = ceil_div(p.q_len, p.queries);
    w.query = rest % tiles * p.queries;
    w.queries = min(p.queries, p.q_len - w.query);
    w.example = rest / tiles;
    const int length = Traits::kKvLengths ? p.kv_lengths[w.example] : p.kv_len;
    const int limit = min(max(length, 0), p.kv_len);
    w.shift = Traits::kFromEnd ? min(max(length, -kLongest), kLongest) - p.q_len : 0;
    w.keys = {p.kv_len, limit, p.left, p.right};
    const int from = w.query + w.shift, to = from + w.queries - 1;
    w.range = w.keys.blocks(from, to, kTileKv);
    w.end = w.keys.has_blind(from, to) ? p.kv_len : w.keys.end(to);
    if (Traits::kPaged && limit == 0) w.range = {0, 0, 0, 0};
    const KeyPart part = key_part(w.range.count(), w.split, p.splits);
    w.first = w.range.first + part.first;
    w.last = w.range.first + part.last;
    return w;
  }

  // --- barriers ----------------------------------------------------------------------

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      mbarrier_init(shared_address(&smem.q_full), full_arrivals());
      mbarrier_init(shared_address(&smem.q_empty), empty_arrivals(1, 1));
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kSlots; ++i) {
        mbarrier_init(shared_address(&smem.full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty[i]), empty_arrivals(1, 1));
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  TRACEA_DEVICE static void wait(const u64& barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(shared_address(&barrier), parity)) {
    }
  }

  // --- producer: one thread ----------------------------------------------------------

  TRACEA_DEVICE void produce() const {
    State state;
    PipelineState<1> queries_state;
    TRACEA_NO_UNROLL
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Work w = work(index);
      if (w.first == w.last) continue;
      wait(smem.q_empty, queries_state.producer_parity());
      queries_state.advance();
      copy_queries(w);
      TRACEA_NO_UNROLL
      for (int block = w.first; block < w.last; ++block) {
        if (w.rows_of(block) == kTileKv) {
          copy_block<kBoxRows>(w, block, kTileKv, p.k, p.v, state);
        } else {
          copy_block<kFewRows>(w, block, w.rows_of(block), p.k_few, p.v_few, state);
        }
      }
    }
  }

  TRACEA_DEVICE void copy_queries(const Work& w) const {
    const u32 full = shared_address(&smem.q_full);
    mbarrier_arrive_expect_tx(full, kSlabs * p.queries * p.group * 128);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(smem.q[slab]), p.q, slab * 64,
                              w.kv_head * p.group, w.query, w.example, full);
    }
  }

  // Copies `rows` keys, rounded up to boxes of kRows, and as many values.
  template <int kRows>
  TRACEA_DEVICE void copy_block(const Work& w, int block, int rows, const TensorMap* k,
                                const TensorMap* v, State& state) const {
    constexpr int kBoxes = kTileKv / kRows;
    const int boxes = ceil_div(rows, kRows);
    int row[kBoxes], where[kBoxes];
    TRACEA_UNROLL
    for (int i = 0; i < kBoxes; ++i) {
      row[i] = block * kTileKv + i * kRows;
      where[i] = w.example;
      if constexpr (Traits::kPaged) {
        const i64 page = row[i] / p.page_rows;
        row[i] -= static_cast<int>(page) * p.page_rows;
        if (i < boxes) where[i] = p.pages[w.example * static_cast<i64>(p.page_count) + page];
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
              slab * 64, row[i], w.kv_head, where[i], full, evict_first_policy());
        }
      }
    }
  }

  // --- consumer: a warpgroup ---------------------------------------------------------

  // What the tensor cores read `units` of 16 bytes into shared memory.
  template <class Descriptor>
  TRACEA_DEVICE static u64 descriptor(u32 units) {
    constexpr u64 kRest = Descriptor::encode(0);
    return (kRest & ~u64{0xFFFFFFFFu}) | (static_cast<u32>(kRest) + units);
  }

  // s = q k' of one block. `start`: of shared memory, in units of 16 bytes.
  TRACEA_DEVICE static void multiply_keys(float (&s)[Scores::kAccumulators], u32 start,
                                          int slot) {
    const u32 k = start + kUnitsToSlots + slot * kSlotUnits;
    wgmma_fence();
    TRACEA_UNROLL
    for (int step = 0; step < kStepsScores; ++step) {
      const int slab = step / 4, in_slab = step % 4;
      const u32 q_units = slab * (kSlabBytesQ / 16) + in_slab * DescriptorQ::kStep;
      const u32 k_units = slab * (kSlabBytesKv / 16) + in_slab * DescriptorK::kStep;
      Scores::mma(s, descriptor<DescriptorQ>(start + q_units),
                  descriptor<DescriptorK>(k + k_units), step != 0);
    }
    wgmma_commit_group();
  }

  // o += weights v of one block, not waited for.
  TRACEA_DEVICE static void multiply_values(float (&o)[Sums::kAccumulators],
                                            const u32 (&weights)[kStepsSums][4], u32 start,
                                            int slot) {
    const u32 v = start + kUnitsToSlots + slot * kSlotUnits;
    wgmma_fence();
    TRACEA_UNROLL
    for (int step = 0; step < kStepsSums; ++step) {
      Sums::mma(o, weights[step], descriptor<DescriptorV>(v + step * DescriptorV::kStep),
                true);
    }
    wgmma_commit_group();
  }

  // Scores of keys that a query must not see, and of keys that do not exist.
  TRACEA_DEVICE void mask(float (&s)[Scores::kAccumulators], int block, const Work& w,
                          const int (&query)[2], int thread) const {
    const int first = block * kTileKv + wgmma_accumulator_col(thread, 0);
    const int stored = p.kv_len - first;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int position = query[half] + w.shift;
      const int begin = w.keys.begin(position) - first, end = w.keys.end(position) - first;
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

  TRACEA_DEVICE void consume() const {
    State state;
    PipelineState<1> queries_state;
    TRACEA_NO_UNROLL
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Work w = work(index);
      const bool has_keys = w.first < w.last;
      if (has_keys) wait(smem.q_full, queries_state.consumer_parity());
      attend(w, state);
      if (has_keys) queries_state.advance();
    }
  }

  TRACEA_DEVICE void attend(const Work& w, State& state) const {
    const int thread = static_cast<int>(threadIdx.x);
    const u32 start = shared_address(smem.q[0]) / 16;
    const int rows = w.queries * p.group;
    const bool has_rows = warp_uniform(thread / kWarpSize) * 16 < rows;
    int query[2];  // of the thread's two rows
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      query[half] = w.query + wgmma_accumulator_row(thread, 2 * half) / p.group;
    }
    float o[Sums::kAccumulators];
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) o[i] = 0.0f;
    OnlineSoftmax softmax(p.scale_log2);
    TRACEA_NO_UNROLL
    for (int block = w.first; block < w.last; ++block) {
      float s[Scores::kAccumulators];
      u32 weights[kStepsSums][4];
      const int keys = state.stage_idx;
      wait(smem.full[keys], state.consumer_parity());
      state.advance();
      multiply_keys(s, start, keys);
      wgmma_wait_group<0>();
      wgmma_fence_operands(s);
      if (thread == 0) {
        mbarrier_arrive(shared_address(&smem.empty[keys]));
        if (block == w.last - 1) mbarrier_arrive(shared_address(&smem.q_empty));
      }
      if (has_rows) {
        float alpha[2];
        if (!w.range.is_full(block)) mask(s, block, w, query, thread);
        if (!softmax.update(s, alpha)) {
          TRACEA_UNROLL
          for (int i = 0; i < Sums::kAccumulators; ++i) o[i] *= alpha[i / 2 % 2];
        }
      }
      round_to_weights(s, weights);
      const int values = state.stage_idx;
      wait(smem.full[values], state.consumer_parity());
      state.advance();
      if (w.rows_of(block) < kTileKv) clear_values(values, w.rows_of(block), thread);
      multiply_values(o, weights, start, values);
      wgmma_wait_group<0>();
      wgmma_fence_operands(o);
      if (thread == 0) mbarrier_arrive(shared_address(&smem.empty[values]));
    }
    if (has_rows) finish(o, softmax, w, query, rows, thread);
  }

  TRACEA_DEVICE void finish(const float (&o)[Sums::kAccumulators],
                            const OnlineSoftmax& softmax, const Work& w,
                            const int (&query)[2], int rows, int thread) const {
    const int column = wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = wgmma_accumulator_row(thread, 2 * half);
      const float total = softmax.total(half);
      if (row >= rows) continue;
      const int head = w.kv_head * p.group + row - (query[half] - w.query) * p.group;
      const i64 at = (static_cast<i64>(w.example) * p.q_len + query[half]) * p.heads + head;
      if constexpr (Traits::kSplits) {
        const i64 part = at * p.splits + w.split;
        if (w.first < w.last) {
          float* to = p.sums + part * kHeadDim + column;
          TRACEA_UNROLL
          for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
            *reinterpret_cast<float2*>(to + 2 * i - 4 * half) = {o[i], o[i + 1]};
          }
        }
        if (thread % 4 == 0) {
          const float most = w.first < w.last ? softmax.most(half) : kNoKey;
          *reinterpret_cast<float2*>(p.totals + part * 2) = {most, total};
        }
      } else {
        const float factor = total == 0.0f ? 0.0f : 1.0f / total;
        Element* to = static_cast<Element*>(p.o) + at * kHeadDim + column;
        TRACEA_UNROLL
        for (int i = 2 * half; i < Sums::kAccumulators; i += 4) {
          *reinterpret_cast<u32*>(to + 2 * i - 4 * half) =
              Packed<Element>::from({o[i] * factor, o[i + 1] * factor}).bits;
        }
        if constexpr (Traits::kSavesLse) {
          const i64 place =
              (static_cast<i64>(w.example) * p.heads + head) * p.q_len + query[half];
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

  using Kernel = AttentionDecodeSm90<Traits>;
  const Kernel kernel{p, *reinterpret_cast<typename Kernel::Shared*>(smem_bytes)};
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  if (threadIdx.x == Traits::kThreads - 1) {
    prefetch_tensormap(p.q);
    prefetch_tensormap(p.k);
    prefetch_tensormap(p.v);
  }
  kernel.initialize();
  if (warp == kWarpgroupSize / kWarpSize) {
    if (elect_one()) kernel.produce();
  } else {
    kernel.consume();
  }
}

}  // namespace tracea
