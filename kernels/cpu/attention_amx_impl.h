// Attention in bf16 on AMX tiles.
//
//   pack q                               -> blocks of 32 rows of an AMX lhs
//   for key block                        (block_kv keys, of those that a row may see)
//     pack k transposed, v               -> panels of 32 columns of an AMX rhs
//     for row tile                       (up to 32 rows)
//       scores = q @ k' in f32; scale, bias, masks
//       weights = online softmax(scores) -> bf16, block of an AMX lhs
//       sums = sums * alpha + weights @ v in f32
//   out = sums / sum of weights
//
// Included by attention_amx.cc inside an unnamed namespace, after vec_impl.h and
// amx_impl.h and under the same rules.

constexpr int64_t kRowTile = kAmxRows;
constexpr int64_t kKeyStep = kAmxCols;
constexpr int64_t kKeyUnit = kAmxDepth;
constexpr bool kEqualTiles = false;  // packed queries come in blocks of 32 rows

#include "attention_common_impl.h"

// 2^x with a relative error of 2.6e-6, for weights that are rounded to bf16.
//
// x = n + r with 0 <= r < 1;  2^r is a minimax polynomial of degree 4.
TRACEA_INLINE Vec RoughExp2(Vec x) {
  const __m512 r = _mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF);
  const Vec f = (Vec)r;
  Vec p = f * 1.35341678e-2f + 5.20114601e-2f;
  p = p * f + 2.41442755e-1f;
  p = p * f + 6.93003833e-1f;
  p = p * f + 1.00000262f;
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
}

// 32 numbers rounded to bf16.
TRACEA_INLINE void StorePair(const Vec (&x)[2], BF16* to) {
  StoreHalves(to, (Half32)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
}

// As SoftmaxRow, on scores that are still to be scaled. A multiple of 32 keys; weights of
// 32 each go to rows of tiles.
TRACEA_INLINE float NarrowSoftmaxRow(const float* scores, float scale, int64_t keys,
                                     BF16* weights, float* max, float* sum) {
  Vec most = Splat(kForbidden), other = most;
  for (int64_t i = 0; i < keys; i += 2 * kLanes) {
    most = Maximum(Load(scores + i), most);
    other = Maximum(Load(scores + i + kLanes), other);
  }
  const float block_max = Fold<Largest>(Maximum(most, other)) * scale;
  const float new_max = block_max > *max ? block_max : *max;
  Vec total{}, total_other{};
  for (int64_t i = 0; i < keys; i += 2 * kLanes) {
    const Vec x[2] = {RoughExp2(Load(scores + i) * scale - new_max),
                      RoughExp2(Load(scores + i + kLanes) * scale - new_max)};
    total += x[0];
    total_other += x[1];
    StorePair(x, weights + i / kAmxDepth * kAmxStepSize);
  }
  const float alpha = *max == new_max ? 1.0f : Exp2(Splat(*max - new_max))[0];
  *sum = *sum * alpha + Fold<Plus>(total + total_other);
  *max = new_max;
  return alpha;
}

int64_t AmxSteps(int64_t depth) { return CeilDiv(depth, kAmxDepth); }

// sums += lhs @ rhs for up to 32 rows and 32 columns.
template <int kRowTiles>
TRACEA_INLINE void AmxPanel(int64_t steps, const BF16* lhs, const BF16* rhs, int64_t cols,
                            float* sums, int64_t stride, bool accumulate) {
  if (cols > kLanes) {
    AmxProduct<kRowTiles, 2>(steps, PackedLhs(lhs), rhs, sums, stride, accumulate);
  } else {
    AmxProduct<kRowTiles, 1>(steps, PackedLhs(lhs), rhs, sums, stride, accumulate);
  }
}

// rows x dim, each row found by `row_of`, as blocks of 32 rows of an AMX lhs.
template <typename RowOf>
TRACEA_INLINE void PackAmxRows(const RowOf& row_of, int64_t rows, int64_t dim,
                               BF16* packed) {
  const int64_t block = AmxSteps(dim) * kAmxStepSize;
  for (int64_t i = 0; i < RoundUp(rows, kAmxRows); ++i) {
    const bool exists = i < rows;
    const BF16* row = row_of(exists ? i : 0);
    BF16* to = packed + i / kAmxRows * block + i % kAmxRows * kAmxDepth;
    for (int64_t p = 0; p < dim; p += kAmxDepth, to += kAmxStepSize) {
      StoreHalves(to, LoadHalves(row + p, exists ? dim - p : 0));
    }
  }
}

struct AmxKernel {
  static void PackQueries(const Forward& f) {
    const BF16* q = (const BF16*)f.args.q;
    const auto row_of = [&](int64_t i) { return q + f.rows.offset(i); };
    PackAmxRows(row_of, f.rows.count(), f.args.head_dim, (BF16*)f.queries);
  }

  static void PackKeys(const Forward& f, int64_t j0, int64_t count) {
    const AttentionArgs& args = f.args;
    const int64_t offset = KeyOffset(args, f.range, j0);
    const int64_t stride = args.kv_heads * args.head_dim;
    PackAmxRhsTransposed((const BF16*)args.k + offset, stride, args.head_dim, count,
                         (BF16*)f.keys);
    PackAmxRhs((const BF16*)args.v + offset, stride, count, args.head_dim,
               (BF16*)f.values);
  }

  template <int kRowTiles>
  static TRACEA_INLINE void ComputeScores(const Forward& f, RowTile tile, Interval at) {
    const int64_t block = AmxSteps(f.args.head_dim) * kAmxStepSize;
    const BF16* lhs = (const BF16*)f.queries + tile.first / kAmxRows * block;
    for (int64_t c = at.lo; c < at.hi; c += kAmxCols) {
      AmxPanel<kRowTiles>(AmxSteps(f.args.head_dim), lhs,
                          (const BF16*)f.keys + c / kAmxCols * block, kAmxCols,
                          f.scores + (c - at.lo), f.block, false);
    }
  }

  // Scores become weights; sums are scaled to the new maximum.
  static void Soften(const Forward& f, RowTile tile, int64_t j0, int64_t keys) {
    const AttentionArgs& args = f.args;
    const float scale = args.scale * kLog2E;
    // A bias is added to what was scaled; a scale of zero or below would turn what
    // forbids a key into something else.
    const bool at_once = !args.bias && !args.mask && scale > 0;
    const int64_t padded = RoundUp(keys, kAmxDepth);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.first + i;
      float* scores = f.scores + i * f.block;
      if (!at_once) ScaleRow(scores, padded, scale);
      MaskRow(f, row, j0, scores, keys);
      const float alpha =
          NarrowSoftmaxRow(scores, at_once ? scale : 1.0f, padded,
                           (BF16*)f.weights + i * kAmxDepth, f.max + row, f.sum + row);
      if (alpha != 1.0f) ScaleRow(f.sums + row * f.width, f.width, alpha);
    }
  }

  template <int kRowTiles>
  static TRACEA_INLINE void AddValues(const Forward& f, RowTile tile, int64_t count,
                                      Interval at) {
    const int64_t panel = AmxSteps(count) * kAmxStepSize;
    const BF16* values = (const BF16*)f.values + at.lo / kAmxDepth * kAmxStepSize;
    for (int64_t d = 0; d < f.args.head_dim; d += kAmxCols) {
      AmxPanel<kRowTiles>(AmxSteps(at.hi - at.lo), (const BF16*)f.weights,
                          values + d / kAmxCols * panel, f.args.head_dim - d,
                          f.sums + tile.first * f.width + d, f.width, true);
    }
  }

  static void UpdateTile(const Forward& f, RowTile tile, int64_t j0, int64_t count,
                         Interval at) {
    const bool half = tile.rows <= 16;
    half ? ComputeScores<1>(f, tile, at) : ComputeScores<2>(f, tile, at);
    Soften(f, tile, j0 + at.lo, at.hi - at.lo);
    half ? AddValues<1>(f, tile, count, at) : AddValues<2>(f, tile, count, at);
  }
};

void RunAttention(const AttentionArgs& args, int64_t block_kv,
                  const AttentionRange& range, float* workspace) {
  const AmxScope scope;
  RunForward<BF16, AmxKernel>(Forward(args, block_kv, range, workspace));
}
