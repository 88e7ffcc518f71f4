// Queries all of whose scores a bias puts below kLeastScore, as one of -1e9 for each key that
// they see: scores differ by less than f32 tells apart there, and so do a log-sum-exp and the
// logarithms of weights. Keys whose bias is near the query's largest one weigh the same, and
// others nothing:
//
//     p = min(2^(log2(e) x - exponent), cap)     exponent: of a bound below all that is near
//                                                cap: 1 / the number of keys that are near
//
// An ordinary query has a cap that is infinite. Numbers that are no numbers stay.
#pragma once

#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/key_range.cuh"

namespace tracea {

// Of f32 from here down neighbours differ by 1 and more.
constexpr float kLeastScore = -8388608.0f;  // -2^23
// Below it lies what jax.nn has in the place of a masked score, and no score.
constexpr float kNoScore = -8.5070592e37f;  // -2^126

// Where the bias of a key and whatever hides it lie; steps are 0 where entries are shared.
struct LowScoresParams {
  const void* bias;        // (1 or batch, 1 or heads, 1 or q_len, 1 or kv_len)
  const u8* mask;          // (1 or batch, 1 or heads, entries of queries, of keys), or null
  const int* kv_lengths;   // (batch), or null
  const int* kv_segments;  // (batch, kv_len), or null
  int kv_len;
  int left, right;  // of the window; not looked at if there is no limit
  int bias_row, bias_key;
  int block_queries, block_kv;  // that an entry of the mask stands for
  int mask_row, mask_key;
  i64 bias_example, bias_head, mask_example, mask_head;
};

TRACEA_DEVICE float min_nan(float a, float b) {
  float v;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// Whether a log-sum-exp is that of a query which sees keys and has only such scores.
TRACEA_DEVICE bool is_low(float lse) { return lse < kLeastScore && lse > kNoScore; }

// Biases of bfloat16 that are not equal lie further apart.
TRACEA_DEVICE float near_scores(float lse) { return fmaf(lse, 1.0f / 512, lse); }

// Of the keys that a query sees those whose bias is near: of every kLanes-th key from `lane`
// on.
template <class Traits, int kLanes>
TRACEA_DEVICE int count_near(const LowScoresParams& p, float lse, int example, int head,
                             int query, int segment, int lane) {
  const int limit =
      p.kv_lengths ? min(max(p.kv_lengths[example], 0), p.kv_len) : p.kv_len;
  const KeyInterval<Traits::kHasLeft, Traits::kHasRight> keys{p.kv_len, limit, p.left, p.right};
  const auto* const bias = static_cast<const typename Traits::BiasElement*>(p.bias) +
                           example * p.bias_example + head * p.bias_head +
                           static_cast<i64>(query) * p.bias_row;
  const u8* const mask = p.mask + example * p.mask_example + head * p.mask_head +
                         static_cast<i64>(query / p.block_queries) * p.mask_row;
  const int* const segments = p.kv_segments + static_cast<i64>(example) * p.kv_len;
  const float bound = near_scores(lse);
  int count = 0;
  TRACEA_NO_UNROLL
  for (int key = keys.begin(query) + lane; key < keys.end(query); key += kLanes) {
    if (p.mask != nullptr && mask[key / p.block_kv * p.mask_key] == 0) continue;
    if (Traits::kSegments && segments[key] != segment) continue;
    count += widen(bias[static_cast<i64>(key) * p.bias_key]) > bound;
  }
  return count;
}

}  // namespace tracea
