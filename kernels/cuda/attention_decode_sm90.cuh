// attention_decode_sm90: attention of few queries to many keys, on Hopper, at the rate at
// which memory delivers keys and values.
//
//   sums, totals = softmax step by step, as attention_sm90, of a part of the keys
//
// The heads that share keys, and all queries, are rows of one tile, so that keys and values
// are read once: row r is head r % heads of query r / heads. 64 rows are what an instruction
// multiplies at least; warps without rows skip the softmax. As most rows would be empty, a
// tile may have heads of kTogether heads of keys, which lie side by side in memory: its
// columns are then the keys of these in turn, and a row does not count those of others.
//
//     column            0  1  2  3  4  5  6  7      kTogether = 2
//     key               0  0  1  1  2  2  3  3
//     head of keys      0  1  0  1  0  1  0  1
//
// It multiplies their values by zero, which is not nothing if one is infinite or NaN. If a sum
// is not finite, the block therefore computes its part again, for one head of keys after the
// other, with zeros in the place of the others' values.
//
// The blocks of kTileKeys keys that a sequence has are dealt out to thread blocks in equal,
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
#include "ptx/vote.cuh"
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
  const TensorMap *k, *v;          // (head_dim, kv_heads, rows, sequences or pages)
  const TensorMap *k_few, *v_few;  // the same in boxes of kFewKeys
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
  int queries;                     // of a tile, with all of its heads 64 rows at most
  int page_rows, page_count;       // of a page; of a sequence
  float scale_log2;                // scale log2(e)
};

template <class Traits>
struct AttentionDecodeSm90Shared {
  alignas(1024) u8 q[Traits::kSlabs][64 * 128];
  alignas(1024) u8 slots[Traits::kSlots][Traits::kSlabs][Traits::kTileKv * 128];
  u64 q_full, q_empty, verdict;
  int is_finite;  // whether no sum is infinite or NaN; known when `verdict` completes
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
  static constexpr int kTogether = Traits::kTogether, kTileKeys = kTileKv / kTogether;
  static constexpr int kBoxKeys = Traits::kBoxKeys, kFewKeys = Traits::kFewKeys;
  static constexpr int kStepsScores = ceil_div(kHeadDim, 16);  // of 16 of the head
  static constexpr int kStepsSums = kTileKv / 16;              // of 16 keys
  static constexpr u32 kSlabBytesQ = 64 * 128, kSlabBytesKv = kTileKv * 128;
  // Distances in a descriptor's unit of 16 bytes, from the start of the queries.
  static constexpr u32 kUnitsToSlots = kSlabs * kSlabBytesQ / 16;
  static constexpr u32 kSlotUnits = kSlabs * kSlabBytesKv / 16;
  static constexpr int kAllHeads = -1;                         // instead of a number
  static constexpr float kLargest = 3.4028235e38f;             // finite number
  static constexpr int kLongest = 1 << 30;  // lengths that may be added without overflow

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == kWarpgroupSize + kWarpSize,
                "a warpgroup multiplies, a warp copies");
  static_assert(kHeadDim % 8 == 0 && kSlabs == ceil_div(kHeadDim, 64), "slabs of 64");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256, "keys in one box, steps of 16");
  static_assert(kTogether == 1 || kTogether == 2 || kTogether == 4 || kTogether == 8,
                "the columns of a thread belong to the same heads in every step of 8");
  static_assert(kTileKeys % kBoxKeys == 0 && kBoxKeys % kFewKeys == 0 &&
                    kFewKeys * kTogether % 8 == 0,
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
    int example, kv_head, split;  // the first head of keys
    int query, queries;  // the first query, and how many there are
    int shift;           // from a query's number to its position
    Interval keys;
    BlockRange range;    // that its sequence has; of them ...
    int first, last;     // ... those of this part
    int end;             // of the keys that any query sees, or takes the mean of

    TRACEA_DEVICE int keys_of(int block) const {
      return min(kTileKeys, end - block * kTileKeys);
    }
  };

  TRACEA_DEVICE int heads_of_tile() const { return kTogether * p.group; }

  // Heads come first, then parts: neighbours read neighbouring memory.
  TRACEA_DEVICE Work work(int index) const {
    const int tiles_of_heads = p.heads / heads_of_tile();
    int rest = index;
    Work w;
    w.kv_head = rest % tiles_of_heads * kTogether;
    rest /= tiles_of_heads;
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
    w.range = w.keys.blocks(from, to, kTileKeys);
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
      mbarrier_init(shared_address(&smem.verdict), 1);
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
    PipelineState<1> queries_state, verdict_state;
    TRACEA_NO_UNROLL
    for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
      const Work w = work(index);
      if (w.first == w.last) continue;
      wait(smem.q_empty, queries_state.producer_parity());
      queries_state.advance();
      copy_queries(w);
      copy_part(w, state);
      if constexpr (kTogether > 1) {
        wait(smem.verdict, verdict_state.consumer_parity());
        verdict_state.advance();
        if (smem.is_finite) continue;
        TRACEA_NO_UNROLL
        for (int head = 0; head < kTogether; ++head) copy_part(w, state);
      }
    }
  }

  TRACEA_DEVICE void copy_part(const Work& w, State& state) const {
    TRACEA_NO_UNROLL
    for (int block = w.first; block < w.last; ++block) {
      if (w.keys_of(block) == kTileKeys) {
        copy_block<kBoxKeys>(w, block, kTileKeys, p.k, p.v, state);
      } else {
        copy_block<kFewKeys>(w, block, w.keys_of(block), p.k_few, p.v_few, state);
      }
    }
  }

  TRACEA_DEVICE void copy_queries(const Work& w) const {
    const u32 full = shared_address(&smem.q_full);
    mbarrier_arrive_expect_tx(full, kSlabs * p.queries * heads_of_tile() * 128);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      cp_async_bulk_tensor_4d(shared_address(smem.q[slab]), p.q, slab * 64,
                              w.kv_head * p.group, w.query, w.example, full);
    }
  }

  // Copies `keys` keys, rounded up to boxes of kKeys, and as many values.
  template <int kKeys>
  TRACEA_DEVICE void copy_block(const Work& w, int block, int keys, const TensorMap* k,
                                const TensorMap* v, State& state) const {
    constexpr int kBoxes = kTileKeys / kKeys;
    constexpr u32 kBoxBytes = kKeys * kTogether * 128;  // of a slab
    const int boxes = ceil_div(keys, kKeys);
    int row[kBoxes], where[kBoxes];
    TRACEA_UNROLL
    for (int i = 0; i < kBoxes; ++i) {
      row[i] = block * kTileKeys + i * kKeys;
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
      mbarrier_arrive_expect_tx(full, kSlabs * kBoxBytes * boxes);
      TRACEA_UNROLL
      for (int i = 0; i < kBoxes; ++i) {
        if (i >= boxes) break;
        TRACEA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          cp_async_bulk_tensor_4d_hinted(
              shared_address(smem.slots[slot][slab]) + i * kBoxBytes, maps[side],
              slab * 64, w.kv_head, row[i], where[i], full, evict_first_policy());
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
    const int column = wgmma_accumulator_col(thread, 0);
    const int first = block * kTileKeys;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int position = query[half] + w.shift;
      const int begin = w.keys.begin(position), end = w.keys.end(position);
      TRACEA_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int from = first + (column + j) / kTogether;
        TRACEA_UNROLL
        for (int i = 2 * half; i < Scores::kAccumulators; i += 4) {
          const int key = 8 / kTogether * (i / 4);
          const bool is_seen =
              key < end - from && (!Traits::kHasLeft || key >= begin - from);
          const float unseen = key < p.kv_len - from ? kMasked : kNoKey;
          s[i + j] = is_seen ? s[i + j] : unseen;
        }
      }
    }
  }

  // Scores of heads of keys that are not a row's.
  TRACEA_DEVICE static void mask_others(float (&s)[Scores::kAccumulators],
                                        const int (&kv_head)[2], int thread) {
    const int column = wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int i = 0; i < Scores::kAccumulators; ++i) {
      const bool is_own = (column + i % 2) % kTogether == kv_head[i / 2 % 2];
      s[i] = is_own ? s[i] : kNoKey;
    }
  }

  // Zeros in the place of values of columns from `columns` on, and, unless it is
  // negative, of all heads of keys but `head`.
  TRACEA_DEVICE void clear_values(int slot, int columns, int head, int thread) const {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      const u32 start = shared_address(smem.slots[slot][slab]);
      const int first = head < 0 ? columns * 8 : 0;  // of 16 bytes, 8 in a column
      TRACEA_NO_UNROLL
      for (int i = first + thread; i < kTileKv * 8; i += kWarpgroupSize) {
        const int column = i / 8;
        const bool is_kept = column < columns && column % kTogether == head;
        if (!is_kept) st_shared(start + i * 16, Quad{});
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
    const int heads = heads_of_tile(), rows = w.queries * heads;
    const bool has_rows = warp_uniform(thread / kWarpSize) * 16 < rows;
    int query[2], kv_head[2];  // of the thread's two rows
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = wgmma_accumulator_row(thread, 2 * half);
      query[half] = w.query + row / heads;
      kv_head[half] = row % heads / p.group;
    }
    float o[Sums::kAccumulators];
    OnlineSoftmax softmax(p.scale_log2);
    const bool has_keys = w.first < w.last;
    bool is_finite = true;
    int head = kAllHeads;
    do {
      attend_part(w, state, o, softmax, query, kv_head, has_rows, head);
      if constexpr (kTogether > 1) {
        if (head == kAllHeads && has_keys) is_finite = give_verdict(o, rows, thread);
      }
      const bool is_final = is_finite || head != kAllHeads;
      if (has_rows && is_final) finish(o, softmax, w, query, kv_head, head);
    } while (!is_finite && ++head < kTogether);
    if (has_keys && thread == 0) mbarrier_arrive(shared_address(&smem.q_empty));
  }

  // Whether all sums of rows that there are are finite; the producer waits for it, too.
  TRACEA_DEVICE bool give_verdict(const float (&o)[Sums::kAccumulators], int rows,
                                  int thread) const {
    bool is_finite = true;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) {
      const bool exists = wgmma_accumulator_row(thread, i) < rows;
      is_finite = is_finite && (!exists || fabsf(o[i]) <= kLargest);
    }
    is_finite = all_of_warpgroup(is_finite);
    if (thread == 0) {
      smem.is_finite = is_finite;
      mbarrier_arrive(shared_address(&smem.verdict));
    }
    return is_finite;
  }

  // Sums and weights of all heads of keys, or of one.
  TRACEA_DEVICE void attend_part(const Work& w, State& state,
                                 float (&o)[Sums::kAccumulators], OnlineSoftmax& softmax,
                                 const int (&query)[2], const int (&kv_head)[2],
                                 bool has_rows, int head) const {
    const int thread = static_cast<int>(threadIdx.x);
    const u32 start = shared_address(smem.q[0]) / 16;
    TRACEA_UNROLL
    for (int i = 0; i < Sums::kAccumulators; ++i) o[i] = 0.0f;
    softmax.reset();
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
      if (thread == 0) mbarrier_arrive(shared_address(&smem.empty[keys]));
      if (has_rows) {
        float alpha[2];
        if (!w.range.is_full(block)) mask(s, block, w, query, thread);
        if constexpr (kTogether > 1) mask_others(s, kv_head, thread);
        if (!softmax.update(s, alpha)) {
          TRACEA_UNROLL
          for (int i = 0; i < Sums::kAccumulators; ++i) o[i] *= alpha[i / 2 % 2];
        }
      }
      round_to_weights(s, weights);
      const int values = state.stage_idx;
      wait(smem.full[values], state.consumer_parity());
      state.advance();
      const int columns = w.keys_of(block) * kTogether;
      if (columns < kTileKv || head >= 0) clear_values(values, columns, head, thread);
      multiply_values(o, weights, start, values);
      wgmma_wait_group<0>();
      wgmma_fence_operands(o);
      if (thread == 0) mbarrier_arrive(shared_address(&smem.empty[values]));
    }
  }

  // Writes what rows have; if `head` is not negative, those of one head of keys.
  TRACEA_DEVICE void finish(const float (&o)[Sums::kAccumulators],
                            const OnlineSoftmax& softmax, const Work& w,
                            const int (&query)[2], const int (&kv_head)[2],
                            int only) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int rows = w.queries * heads_of_tile();
    const int column = wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = wgmma_accumulator_row(thread, 2 * half);
      const float total = softmax.total(half);
      if (row >= rows || (only >= 0 && kv_head[half] != only)) continue;
      const int head = w.kv_head * p.group + row % heads_of_tile();
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
