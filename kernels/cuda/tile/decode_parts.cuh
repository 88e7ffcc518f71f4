// What both roles of attention_decode_sm90 share: the arguments, shared memory with its
// barriers, and the part of a sequence that a thread block computes at a time.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tma_4d.cuh"
#include "tile/attention_operands.cuh"
#include "tile/common.cuh"
#include "tile/key_parts.cuh"
#include "tile/key_range.cuh"
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

// One part of one tile, that a thread block computes at a time, and both roles know.
template <class Traits>
struct DecodePart {
  using Interval = KeyInterval<Traits::kHasLeft, Traits::kHasRight>;

  int example, kv_head, split;
  int query, queries;  // the first query, and how many there are
  int shift;           // from a query's number to its position
  Interval keys;
  BlockRange range;    // that its sequence has; of them ...
  int first, last;     // ... those of this part
  int end;             // of the keys that any query sees, or takes the mean of

  TRACEA_DEVICE int rows_of(int block) const {
    return min(Traits::kTileKv, end - block * Traits::kTileKv);
  }
};

template <class Traits>
struct DecodeParts {
  using Shared = AttentionDecodeSm90Shared<Traits>;
  using State = PipelineState<Traits::kSlots>;
  using Part = DecodePart<Traits>;
  using Queries = HeadTile<64, Traits::kHeadDim>;
  using Keys = HeadTile<Traits::kTileKv, Traits::kHeadDim>;  // and values

  static constexpr int kTileKv = Traits::kTileKv, kSlabs = Traits::kSlabs;
  static constexpr int kLongest = 1 << 30;  // lengths that may be added without overflow

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == kWarpgroupSize + kWarpSize,
                "a warpgroup multiplies, a warp copies");
  static_assert(Traits::kHeadDim % 8 == 0 && kSlabs == Queries::kSlabs, "slabs of 64");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(sizeof(Shared::q) == Queries::kBytes, "slots follow the queries");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every slot starts free");

  const AttentionDecodeSm90Params& p;
  Shared& smem;

  // Heads come first, then parts: neighbours read neighbouring memory.
  TRACEA_DEVICE Part part_at(int index) const {
    const int kv_heads = p.heads / p.group;
    int rest = index;
    Part own;
    own.kv_head = rest % kv_heads;
    rest /= kv_heads;
    own.split = rest % p.splits;
    rest /= p.splits;
    const int tiles = ceil_div(p.q_len, p.queries);
    own.query = rest % tiles * p.queries;
    own.queries = min(p.queries, p.q_len - own.query);
    own.example = rest / tiles;
    const int length = Traits::kKvLengths ? p.kv_lengths[own.example] : p.kv_len;
    const int limit = min(max(length, 0), p.kv_len);
    own.shift = Traits::kFromEnd ? min(max(length, -kLongest), kLongest) - p.q_len : 0;
    own.keys = {p.kv_len, limit, p.left, p.right};
    const int from = own.query + own.shift, to = from + own.queries - 1;
    own.range = own.keys.blocks(from, to, kTileKv);
    own.end = own.keys.has_blind(from, to) ? p.kv_len : own.keys.end(to);
    if (Traits::kPaged && limit == 0) own.range = {0, 0, 0, 0};
    const KeyPart part = key_part(own.range.count(), own.split, p.splits);
    own.first = own.range.first + part.first;
    own.last = own.range.first + part.last;
    return own;
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
};

}  // namespace tracea
