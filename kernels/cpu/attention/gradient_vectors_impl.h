// The gradient of attention on the register tiles of the matrix product, for every dtype,
// of words as in attention/vectors_impl.h.
//
// Included by attention/<isa>.cc after attention/vectors_impl.h and under the same rules.

#include "attention/gradient_common_impl.h"

struct TiledGradient {
  template <typename RowOf>
  static void PackLhs(const Gradient& g, const RowOf& row_of, float scale, float* to) {
    ForRowTiles(g.rows.count(), [&](RowTile t) {
      const auto of_tile = [&](int64_t i) { return row_of(t.first + i); };
      PackRows(g.args.type, of_tile, t.rows, g.args.head_dim, scale,
               to + t.first * g.width);
    });
  }

  static void PackTransposed(DType type, const void* from, int64_t stride, int64_t depth,
                             int64_t cols, float* to) {
    PackColumns(type, from, stride, depth, cols, to);
  }

  static void PackStored(DType type, const void* from, int64_t stride, int64_t depth,
                         int64_t cols, float* to) {
    PackStoredColumns(type, from, stride, depth, cols, to);
  }

  static TRACEA_INLINE void Products(const Gradient& g, RowTile tile, Interval at) {
    const int64_t words = WordsIn(g.args.head_dim), cols = at.hi - at.lo;
    for (int i = 0; i < 2; ++i) {
      TileProduct(tile.rows, words, g.lhs[i] + tile.first * g.width,
                  g.transposed[i] + at.lo * words, words * kTileN, cols,
                  i == 0 ? g.scores : g.dp, g.block, false);
    }
    for (int64_t i = 0; kWordDepth > 1 && i < tile.rows; ++i) {
      ScaleRow(g.scores + i * g.block, RoundUp(cols, kKeyUnit), g.args.scale * kLog2E);
    }
  }

  // Where vector v of row i lies in a tile of lhs.
  static TRACEA_INLINE int64_t LhsAt(int64_t v, int64_t i, int64_t rows) {
    constexpr int64_t kPerChunk = kChunk / kLanes;
    return (v / kPerChunk * rows + i) * kChunk + v % kPerChunk * kLanes;
  }

  // Calls store(v, weights, ds) with vector v of words of them, for each of row i.
  template <bool kByRow, typename Body>
  static TRACEA_INLINE void Weigh(const Gradient& g, int64_t i, int64_t row, Interval at,
                                  const Body& store) {
    const float *scores = g.scores + i * g.block, *dp = g.dp + i * g.block;
    const float *lses = g.col_lse + at.lo, *deltas = g.col_delta + at.lo;
    Vec lse = kByRow ? Splat(g.row_lse[row]) : Vec{};
    Vec delta = kByRow ? Splat(g.row_delta[row]) : Vec{};
    for (int64_t c = 0, v = 0; c < at.hi - at.lo; ++v) {
      Vec weight[kWordDepth], ds[kWordDepth];
      TRACEA_UNROLL
      for (int d = 0; d < kWordDepth; ++d, c += kLanes) {
        if (!kByRow) {
          lse = Load(lses + c);
          delta = Load(deltas + c);
        }
        weight[d] = Exp2(Load(scores + c) - lse);
        ds[d] = weight[d] * (Load(dp + c) - delta);
      }
      store(v, ToWords(weight), ToWords(ds));
    }
  }

  template <bool kByRow>
  static TRACEA_INLINE void Row(const Gradient& g, int64_t i, int64_t rows, int64_t row,
                                Interval at) {
    Weigh<kByRow>(g, i, row, at, [&](int64_t v, const Vec& weights, const Vec& ds) {
      const int64_t to = LhsAt(v, i, rows);
      if (!kByRow) Store(g.weights + to, weights);
      Store(g.ds + to, ds);
    });
  }

  static void Accumulate(const Gradient& g, RowTile tile, int which, int64_t count,
                         Interval at) {
    TileProduct(tile.rows, WordsIn(at.hi - at.lo), which == 0 ? g.ds : g.weights,
                g.stored[which] + WordsIn(at.lo) * kTileN, WordsIn(count) * kTileN,
                g.args.head_dim, g.sums[which] + tile.first * g.width, g.width, true);
  }
};

void RunGradientOfQueries(const AttentionGradientArgs& args, int64_t block,
                          const AttentionRange& range, float* workspace) {
  Workspace space(workspace);
  RunQueryGradient<TiledGradient>(Gradient(args, block, range, space));
}

void RunGradientOfKeys(const AttentionGradientArgs& args, int64_t block,
                       const AttentionRange& range, float* workspace) {
  Workspace space(workspace);
  RunKeyGradient<TiledGradient>(Gradient(args, block, range, space));
}

#include "attention/gradient_head_impl.h"
