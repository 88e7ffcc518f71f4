// Attention on the register tiles of the matrix product, for every dtype, of words (f32, or
// pairs of bf16: common/word_impl.h).
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
// Included by attention/<isa>.cc inside an unnamed namespace, after common/vec_impl.h and
// under the same rules. The includer defines TRACEA_TILE, and TRACEA_WORDS_OF_BF16 if
// bf16 is multiplied in pairs.

#include "common/tile_impl.h"
#include "common/pack_impl.h"

constexpr int64_t kRowTile = kTileM;
constexpr int64_t kKeyStep = kTileN;
constexpr int64_t kKeyUnit = kVecDepth;
constexpr int64_t kTilesAtOnce = 1;
constexpr bool kEqualTiles = true;

#include "attention/common_impl.h"

// A vector of words of kKeyUnit weights.
TRACEA_INLINE Vec ToWords(const Vec (&weights)[kWordDepth]) {
#if defined(TRACEA_WORDS_OF_BF16)
  return (Vec)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
#else
  return weights[0];
#endif
}

// Writes the weights 2^(score - shift) of a row, of `vecs` vectors of whole words, in chunks
// of the micro-kernel's lhs, `chunk_step` apart. Returns their sum, in lanes.
TRACEA_INLINE Vec WeighRow(const float* scores, int64_t vecs, float shift, float* weights,
                           int64_t chunk_step) {
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
  return total;
}

// rows x dim, each row found by `row_of`, times `scale` unless they are of bf16 as words;
// as lhs of the micro-kernel.
template <typename RowOf>
TRACEA_INLINE void PackRows(DType type, const RowOf& row_of, int64_t rows, int64_t dim,
                            float scale, float* packed) {
  for (int64_t i = 0; i < rows; ++i) {
    const void* row = row_of(i);
    OfType(type, [&](auto t) {
      for (int64_t p = 0; p < WordsIn(dim); p += kLanes) {
        float* to = packed + (p / kChunk * rows + i) * kChunk + p % kChunk;
        const int64_t at = p * kWordDepth;
        const Vec words = LoadWordsUpTo((const decltype(t)*)row + at, dim - at);
        Store(to, kWordDepth == 1 ? words * scale : words);
      }
    });
  }
}

// Columns as rhs of the micro-kernel, from rows of the depth or across it.
void PackColumns(DType type, const void* from, int64_t stride, int64_t depth,
                 int64_t cols, float* to) {
  OfType(type, [&](auto t) {
    PackRhsTransposed((const decltype(t)*)from, stride, depth, cols, to);
  });
}
void PackStoredColumns(DType type, const void* from, int64_t stride, int64_t depth,
                       int64_t cols, float* to) {
  OfType(type,
         [&](auto t) { PackRhs((const decltype(t)*)from, stride, depth, cols, to); });
}

// out = lhs @ rhs, or out += lhs @ rhs if `accumulate`, for one row tile of packed lhs
// and for panels of packed rhs, `panel` apart.
TRACEA_INLINE void TileProduct(int64_t rows, int64_t words, const float* lhs,
                               const float* rhs, int64_t panel, int64_t cols, float* out,
                               int64_t stride, bool accumulate, LhsOrder order = kByRow) {
  for (int64_t c = 0; c < cols; c += kTileN, out += kTileN, rhs += panel) {
    const MicroKernelFn micro = MicroKernelFor(order, rows, cols - c);
    micro(words, lhs, rhs, accumulate ? out : nullptr, stride, out, stride, nullptr);
  }
}

struct Tiled {
  static void PackQueries(const Forward& f) {
    const AttentionArgs& args = f.args;
    const float scale = args.scale * kLog2E;
    ForRowTiles(f.rows.count(), [&](RowTile t) {
      const auto row_of = [&](int64_t i) {
        return At(args.type, args.q, f.rows.offset(t.first + i));
      };
      PackRows(args.type, row_of, t.rows, args.head_dim, scale,
               f.queries + t.first * f.depth);
    });
  }

  static void PackKeys(const Forward& f, int64_t j0, int64_t count) {
    const AttentionArgs& args = f.args;
    const int64_t offset = KeyOffset(args, f.range, j0);
    const int64_t stride = args.kv_heads * args.head_dim;
    PackColumns(args.type, At(args.type, args.k, offset), stride, args.head_dim, count,
                f.keys);
    PackStoredColumns(args.type, At(args.type, args.v, offset), stride, count,
                      args.head_dim, f.values);
  }

  // Scores of some rows of a tile, of the keys from j on, become weights; the rows' sums
  // are scaled to what is subtracted now.
  static TRACEA_INLINE void SoftenRows(const Forward& f, RowTile tile, int64_t first,
                                       int64_t rows, int64_t j, int64_t keys) {
    const int64_t padded = RoundUp(keys, kKeyUnit), row = tile.first + first;
    SoftmaxRows softmax;
    float* scores = f.scores + first * f.block;
    for (int64_t i = 0; i < rows; ++i) {
      float* of_row = scores + i * f.block;
      if (kWordDepth > 1) ScaleRow(of_row, padded, f.args.scale * kLog2E);
      MaskRow(f, row + i, j, of_row, keys);
      softmax.TakeMaximum(i, of_row, padded / kLanes);
    }
    softmax.Shift(rows, 1.0f, f.max + row);
    for (int64_t i = 0; i < rows; ++i) {
      const float alpha = softmax.alpha[i];
      if (alpha != 1.0f) ScaleRow(f.sums + (row + i) * f.width, f.width, alpha);
      float* weights = f.weights + (first + i) * kChunk;
      softmax.AddWeights(i, WeighRow(scores + i * f.block, padded / kLanes,
                                     softmax.shift[i], weights, tile.rows * kChunk));
    }
    softmax.Finish(rows, f.sum + row);
  }

  static void UpdateTile(const Forward& f, RowTile tile, int64_t j0, int64_t count,
                           Interval at) {
    const int64_t dim = f.args.head_dim, keys = at.hi - at.lo, words = WordsIn(dim);
    TileProduct(tile.rows, words, f.queries + tile.first * f.depth, f.keys + at.lo * words,
                words * kTileN, keys, f.scores, f.block, false);
    for (int64_t i = 0; i < tile.rows; i += kLanes) {
      SoftenRows(f, tile, i, Min(kLanes, tile.rows - i), j0 + at.lo, keys);
    }
    TileProduct(tile.rows, WordsIn(keys), f.weights, f.values + WordsIn(at.lo) * kTileN,
                WordsIn(count) * kTileN, dim, f.sums + tile.first * f.width, f.width,
                true);
  }

  static void UpdateBlock(const Forward& f, int64_t j0, int64_t count, KeyFetch next) {
    PackKeys(f, j0, count);
    ForSeeingTiles(f, j0, count, next, [&](RowTile tile, Interval at) {
      UpdateTile(f, tile, j0, count, at);
    });
  }
};

void RunAttention(const AttentionArgs& args, int64_t block_kv,
                  const AttentionRange& range, float* workspace) {
  Workspace space(workspace);
  RunForward<Tiled>(Forward(args, block_kv, range, space));
}
