// What the backward pass of attention knows of each query before it begins: two numbers, the
// id of its segment, and beside a bias what bounds its weights.
//
//     exponent = log2(e) lse        p = 2^(log2(e) scale q k' - exponent)
//     delta = sum over columns of do o
//     cap                           see tile/low_scores.cuh
//
// The exponent of a query that has no gradient is infinite, so that its p are 0: queries past
// their number, and those that see no key, whose lse is that of scores that jax.nn masks.
//
// Of the queries that see no key, which weigh all values equally, the sum of do is left for
// each tile of queries (kBlind).
//
// Where sums of dq are added up in memory (tile/attention_sums.cuh), what is added to begins
// with zeros: the sums, or if they are ordered the numbers of those that had their turn.
//
// kLanes neighbouring lanes share a row of o and do, 16 bytes each at a time. Rows of
// neighbouring heads are neighbours in memory, so heads are the fastest of the grid.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/low_scores.cuh"

namespace tracea {

struct AttentionRowsParams {
  const void *o, *d_out;  // (batch, q_len, heads, columns)
  const float* lse;       // (batch, heads, q_len)
  const int* q_lengths;   // (batch), or null
  const int* segments;    // (batch, q_len), or null
  float* rows;            // (batch, heads, planes, padded): exponents, deltas, ids, caps
  float* blind;           // (batch, tiles, heads, columns), or null
  float* sums;            // (batch, heads, padded, kSumColumns), or null
  int* turns;             // (batch, heads, blocks of kBlockQ), or null
  int q_len, padded, heads;
  LowScoresParams low;  // looked at beside a bias
};

// Counts the keys that queries of low scores weigh, and writes caps. A bit for each pass in
// which the thread's row is such a query. Of others a log-sum-exp below kLeastScore says that
// they see no key: scores are masked by less, also by cuDNN (-2^41).
template <class Traits, int kPasses>
TRACEA_DEVICE u32 cap_low_rows(const AttentionRowsParams& p, float* caps, i64 heads_before,
                               int example, int head, int first, int count) {
  constexpr int kLanes = Traits::kLanes, kRows = Traits::kThreads / kLanes;
  static_assert(kPasses <= 32, "a bit for each");
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  u32 found = 0;
  TRACEA_NO_UNROLL
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first + pass * kRows + static_cast<int>(threadIdx.x) / kLanes;
    const float lse = row < count ? p.lse[heads_before * p.q_len + row] : 0.0f;
    int keys = 0;
    if (__any_sync(0xFFFFFFFFu, is_low(lse))) {
      if (is_low(lse)) {
        const int segment =
            Traits::kSegments ? p.segments[static_cast<i64>(example) * p.q_len + row] : 0;
        keys = count_near<Traits, kLanes>(p.low, lse, example, head, row, segment, lane);
      }
      TRACEA_UNROLL
      for (int other = kLanes / 2; other > 0; other /= 2) {
        keys += __shfl_xor_sync(0xFFFFFFFFu, keys, other);
      }
    }
    found |= static_cast<u32>(keys > 0) << pass;
    if (lane == 0 && row < p.padded) {
      caps[row] = keys > 0 ? 1.0f / static_cast<float>(keys) : __int_as_float(0x7F800000);
    }
  }
  return found;
}

template <class Traits>
TRACEA_DEVICE void attention_rows(const AttentionRowsParams& p) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kColumns = Traits::kColumns;
  constexpr int kRows = Traits::kThreads / kLanes;  // of a pass
  static_assert(8 * kLanes >= kColumns, "a row in one step");
  const int tiles = ceil_div(p.padded, Traits::kRows);
  const u32 tile = blockIdx.x / p.heads, head = blockIdx.x - tile * p.heads;
  const int example = static_cast<int>(tile / tiles);
  const int first = static_cast<int>(tile - example * tiles) * Traits::kRows;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int count =
      Traits::kQLengths ? min(max(p.q_lengths[example], 0), p.q_len) : p.q_len;
  const i64 heads_before = static_cast<i64>(example) * p.heads + head;
  constexpr int kCaps = 2 + Traits::kSegments;  // their plane
  float* const exponents = p.rows + heads_before * (kCaps + Traits::kBiased) * p.padded;

  if constexpr (Traits::kSumColumns > 0) {
    const int parts = Traits::kSumColumns / 64;
    const i64 part = (heads_before * p.padded + first) / 64 * parts;
    if constexpr (Traits::kOrdered) {
      const i64 row = heads_before * p.padded + first;
      if (threadIdx.x == 0) p.turns[row / Traits::kBlockQ] = 0;
    } else {
      Words* const sums = reinterpret_cast<Words*>(p.sums + part * 4096);
      TRACEA_UNROLL
      for (int i = 0; i < parts * 1024; i += Traits::kThreads) {
        sums[i + threadIdx.x] = Words{};
      }
    }
  }

  float sum[8] = {};
  bool has_blind = false;
  constexpr int kPasses = Traits::kRows / kRows;
  u32 low = 0;
  if constexpr (Traits::kBiased) {
    low = cap_low_rows<Traits, kPasses>(p, exponents + kCaps * p.padded, heads_before, example,
                                        static_cast<int>(head), first, count);
  }

  TRACEA_UNROLL
  for (int pass = 0; pass < kPasses; ++pass) {
    const bool is_capped = (low >> pass & 1u) != 0;
    const int row = first + pass * kRows + static_cast<int>(threadIdx.x) / kLanes;
    float delta = 0.0f, lse = 0.0f;
    if (row < count) {
      lse = p.lse[heads_before * p.q_len + row];
      const bool is_blind = Traits::kBlind && lse < kLeastScore && !is_capped;
      has_blind = has_blind || is_blind;
      const i64 at = ((static_cast<i64>(example) * p.q_len + row) * p.heads + head) * kColumns;
      if (8 * lane < kColumns) {
        const Words o = *reinterpret_cast<const Words*>(
            static_cast<const Element*>(p.o) + at + 8 * lane);
        const Words d = *reinterpret_cast<const Words*>(
            static_cast<const Element*>(p.d_out) + at + 8 * lane);
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Pair x = Packed<Element>{o.w[i]}.widen(), y = Packed<Element>{d.w[i]}.widen();
          delta = fmaf(x.x, y.x, fmaf(x.y, y.y, delta));
          sum[2 * i] += is_blind ? y.x : 0.0f;
          sum[2 * i + 1] += is_blind ? y.y : 0.0f;
        }
      }
    }
    TRACEA_UNROLL
    for (int other = kLanes / 2; other > 0; other /= 2) {
      delta += __shfl_xor_sync(0xFFFFFFFFu, delta, other);
    }
    if (lane == 0 && row < p.padded) {
      float exponent = __int_as_float(0x7F800000);  // inf
      if (is_capped) lse = near_scores(lse);
      if (row < count && (is_capped || !(lse < kLeastScore))) {  // also of NaN
        exponent = lse * 1.44269504f;
      }
      // Scores of -inf for all keys leave NaN, and a log-sum-exp as if masks hid the keys.
      if (lse < kLeastScore && !(delta == delta)) exponent = delta;
      exponents[row] = exponent;
      exponents[p.padded + row] = exponent < __int_as_float(0x7F800000) ? delta : 0.0f;
      if constexpr (Traits::kSegments) {
        const i64 at = static_cast<i64>(example) * p.q_len + min(row, p.q_len - 1);
        exponents[2 * p.padded + row] = __int_as_float(p.segments[at]);
      }
    }
  }
  if constexpr (Traits::kBlind) {
    __shared__ float parts[kRows][8 * kLanes];
    has_blind = __syncthreads_or(has_blind) != 0;
    if (has_blind) {
      TRACEA_UNROLL
      for (int i = 0; i < 8; ++i) parts[threadIdx.x / kLanes][8 * lane + i] = sum[i];
      __syncthreads();
    }
    float* const out = p.blind + (static_cast<i64>(tile) * p.heads + head) * kColumns;
    for (int column = static_cast<int>(threadIdx.x); column < kColumns;
         column += Traits::kThreads) {
      float total = 0.0f;
      for (int i = 0; has_blind && i < kRows; ++i) total += parts[i][column];
      out[column] = total;
    }
  }
}

}  // namespace tracea
