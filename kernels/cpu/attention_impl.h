// Attention on the register tiles of the matrix product, for every dtype, of words (f32, or
// pairs of bf16: gemm_word_impl.h).
//
//   pack q, scaled                       -> row tiles [words / kChunk][rows][kChunk]
//   for key block                        (block_kv keys, of those that a row may see)
//     pack k transposed                  -> panels [block_kv / kTileN][words][kTileN]
//     pack v                             -> panels [dim / kTileN][words][kTileN]
//     for row tile                       (up to kTileM rows)
//       scores = q @ k' by micro-kernel; bias, masks
//       weights = online softmax(scores) -> chunks of a micro-kernel's lhs
//       sums = sums * alpha + weights @ v by micro-kernel
//   out = sums / sum of weights
//
// Scores are in base 2: scale * log2(e) is folded into q, but multiplies the scores if q
// stays bf16, which would be rounded once more. The blocks are cut at multiples of
// block_kv, wherever a task's rows begin to see keys: other cuts would change bits.
//
// Included by attention_<isa>.cc inside an unnamed namespace, after vec_impl.h and under
// the same rules. The includer defines TRACEA_TILE_M, and TRACEA_WORDS_OF_BF16 if bf16 is
// multiplied in pairs.

#include "gemm_tile_impl.h"
#include "gemm_pack_impl.h"

constexpr int64_t kRowTile = kTileM;
constexpr int64_t kKeyStep = kTileN;
constexpr int64_t kKeyUnit = kVecDepth;
constexpr bool kEqualTiles = true;

#include "attention_common_impl.h"

// A vector of words of kKeyUnit weights.
TRACEA_INLINE Vec ToWords(const Vec (&weights)[kWordDepth]) {
#if defined(TRACEA_WORDS_OF_BF16)
  return (Vec)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
#else
  return weights[0];
#endif
}

// One row of the online softmax. `scores` has `vecs` vectors, of whole words. Writes the
// weights 2^(score - max) in chunks of the micro-kernel's lhs, `chunk_step` apart; updates
// the row's maximum and its sum of weights; returns what earlier sums must be scaled by.
TRACEA_INLINE float SoftmaxRow(const float* scores, int64_t vecs, float* weights,
                               int64_t chunk_step, float* max, float* sum) {
  Vec most = Splat(*max);
  for (int64_t i = 0; i < vecs; ++i) most = Maximum(Load(scores + i * kLanes), most);
  const float new_max = Fold<Largest>(most);
  const Vec shift = Splat(new_max);
  constexpr int64_t kPerChunk = kChunk / kLanes;
  Vec total{};
  for (int64_t i = 0; i < vecs / kWordDepth; ++i, scores += kVecDepth) {
    Vec weight[kWordDepth];
    TRACEA_UNROLL
    for (int d = 0; d < kWordDepth; ++d) {
      weight[d] = Exp2(Load(scores + d * kLanes) - shift);
      total += weight[d];
    }
    Store(weights + (i / kPerChunk) * chunk_step + (i % kPerChunk) * kLanes,
          ToWords(weight));
  }
  const float alpha = Exp2(Splat(*max - new_max))[0];
  *sum = *sum * alpha + Fold<Plus>(total);
  *max = new_max;
  return alpha;
}

// rows x dim, each row found by `row_of`, times `scale` unless they are of bf16 as words;
// as lhs of the micro-kernel.
template <typename T, typename RowOf>
TRACEA_INLINE void PackRows(const RowOf& row_of, int64_t rows, int64_t dim, float scale,
                            float* packed) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = row_of(i);
    for (int64_t p = 0; p < WordsIn(dim); p += kLanes) {
      float* to = packed + (p / kChunk * rows + i) * kChunk + p % kChunk;
      const int64_t at = p * kWordDepth;
      const Vec words = LoadWordsUpTo(row + at, dim - at);
      Store(to, kWordDepth == 1 ? words * scale : words);
    }
  }
}

// out = lhs @ rhs, or out += lhs @ rhs if `accumulate`, for one row tile of packed lhs
// and for panels of packed rhs, `panel` apart.
TRACEA_INLINE void TileProduct(int64_t rows, int64_t words, const float* lhs,
                               const float* rhs, int64_t panel, int64_t cols, float* out,
                               int64_t stride, bool accumulate) {
  for (int64_t c = 0; c < cols; c += kTileN, out += kTileN, rhs += panel) {
    const MicroKernelFn micro = kMicroKernels.table[cols - c > kLanes][rows - 1];
    micro(words, lhs, rhs, accumulate ? out : nullptr, stride, out, stride, nullptr);
  }
}

template <typename T>
struct Tiled {
  static void PackQueries(const Forward& f) {
    const T* q = (const T*)f.args.q;
    const float scale = f.args.scale * kLog2E;
    ForRowTiles(f.rows.count(), [&](RowTile t) {
      const auto row_of = [&](int64_t i) { return q + f.rows.offset(t.first + i); };
      PackRows<T>(row_of, t.rows, f.args.head_dim, scale, f.queries + t.first * f.depth);
    });
  }

  static void PackKeys(const Forward& f, int64_t j0, int64_t count) {
    const AttentionArgs& args = f.args;
    const int64_t offset = KeyOffset(args, f.range, j0);
    const int64_t stride = args.kv_heads * args.head_dim;
    PackRhsTransposed((const T*)args.k + offset, stride, args.head_dim, count, f.keys);
    PackRhs((const T*)args.v + offset, stride, count, args.head_dim, f.values);
  }

  static void UpdateTile(const Forward& f, RowTile tile, int64_t j0, int64_t count,
                           Interval at) {
    const int64_t dim = f.args.head_dim, keys = at.hi - at.lo, words = WordsIn(dim);
    TileProduct(tile.rows, words, f.queries + tile.first * f.depth, f.keys + at.lo * words,
                words * kTileN, keys, f.scores, f.block, false);
    const int64_t padded = RoundUp(keys, kKeyUnit);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.first + i;
      float* scores = f.scores + i * f.block;
      if (kWordDepth > 1) ScaleRow(scores, padded, f.args.scale * kLog2E);
      MaskRow(f, row, j0 + at.lo, scores, keys);
      const float alpha = SoftmaxRow(scores, padded / kLanes, f.weights + i * kChunk,
                                     tile.rows * kChunk, f.max + row, f.sum + row);
      if (alpha != 1.0f) ScaleRow(f.sums + row * f.width, f.width, alpha);
    }
    TileProduct(tile.rows, WordsIn(keys), f.weights, f.values + WordsIn(at.lo) * kTileN,
                WordsIn(count) * kTileN, dim, f.sums + tile.first * f.width, f.width,
                true);
  }
};

template <typename T>
void RunTiled(const AttentionArgs& args, int64_t block_kv, const AttentionRange& range,
              float* workspace) {
  RunForward<T, Tiled<T>>(Forward(args, block_kv, range, workspace));
}
