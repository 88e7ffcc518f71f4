// The gradient of attention in bf16 on AMX tiles.
//
// Included by attention/amx.cc after attention/amx_impl.h and under the same rules.

#include "attention/gradient_common_impl.h"

struct AmxGradient {
  template <typename RowOf>
  static void PackLhs(const Gradient& g, const RowOf& row_of, float, float* to) {
    PackAmxRows(row_of, g.rows.count(), g.args.head_dim, (BF16*)to);
  }

  static void PackTransposed(DType, const void* from, int64_t stride, int64_t depth,
                             int64_t cols, float* to) {
    PackAmxRhsTransposed((const BF16*)from, stride, depth, cols, (BF16*)to);
  }

  static void PackStored(DType, const void* from, int64_t stride, int64_t depth,
                         int64_t cols, float* to) {
    PackAmxRhs((const BF16*)from, stride, depth, cols, (BF16*)to);
  }

  template <int kRowTiles>
  static TRACEA_INLINE void TileProducts(const Gradient& g, RowTile tile, Interval at) {
    const int64_t steps = AmxSteps(g.args.head_dim), block = steps * kAmxStepSize;
    for (int i = 0; i < 2; ++i) {
      const BF16* lhs = (const BF16*)g.lhs[i] + tile.first / kAmxRows * block;
      const BF16* rhs = (const BF16*)g.transposed[i] + at.lo / kAmxCols * block;
      float* to = i == 0 ? g.scores : g.dp;
      for (int64_t c = at.lo; c < at.hi; c += kAmxCols, to += kAmxCols, rhs += block) {
        AmxPanel<kRowTiles>(steps, lhs, rhs, kAmxCols, to, g.block, false);
      }
    }
  }

  static void Products(const Gradient& g, RowTile tile, Interval at) {
    tile.rows <= 16 ? TileProducts<1>(g, tile, at) : TileProducts<2>(g, tile, at);
  }

  // Weights (and ds) of 16 columns from c on. The scores are still to be scaled, which
  // must not change what forbids.
  template <bool kByRow>
  static TRACEA_INLINE Vec Weight(const Gradient& g, const float* scores, int64_t row,
                                  int64_t col) {
    const Vec score = Load(scores);
    const Vec scaled = score * (g.args.scale * kLog2E);
    const Vec lse = kByRow ? Splat(g.row_lse[row]) : Load(g.col_lse + col);
    return RoughExp2(Select(score == kForbidden, score, scaled - lse));
  }

  template <bool kByRow>
  static TRACEA_INLINE void Row(const Gradient& g, int64_t i, int64_t, int64_t row,
                                Interval at) {
    const float *scores = g.scores + i * g.block, *dp = g.dp + i * g.block;
    for (int64_t c = 0; c < at.hi - at.lo; c += kAmxDepth) {
      Vec weight[2], ds[2];
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int64_t from = c + half * kLanes, col = at.lo + from;
        weight[half] = Weight<kByRow>(g, scores + from, row, col);
        const Vec delta = kByRow ? Splat(g.row_delta[row]) : Load(g.col_delta + col);
        ds[half] = weight[half] * (Load(dp + from) - delta);
      }
      const int64_t to = c / kAmxDepth * kAmxStepSize + i * kAmxDepth;
      if (!kByRow) StorePair(weight, (BF16*)g.weights + to);
      StorePair(ds, (BF16*)g.ds + to);
    }
  }

  template <int kRowTiles>
  static TRACEA_INLINE void AddProduct(const Gradient& g, RowTile tile, int which,
                                       int64_t count, Interval at) {
    const int64_t panel = AmxSteps(count) * kAmxStepSize, dim = g.args.head_dim;
    const BF16* rhs = (const BF16*)g.stored[which] + at.lo / kAmxDepth * kAmxStepSize;
    float* sums = g.sums[which] + tile.first * g.width;
    const BF16* lhs = (const BF16*)(which == 0 ? g.ds : g.weights);
    for (int64_t d = 0; d < dim; d += kAmxCols, rhs += panel) {
      AmxPanel<kRowTiles>(AmxSteps(at.hi - at.lo), lhs, rhs, dim - d, sums + d, g.width,
                          true);
    }
  }

  static void Accumulate(const Gradient& g, RowTile tile, int which, int64_t count,
                         Interval at) {
    tile.rows <= 16 ? AddProduct<1>(g, tile, which, count, at)
                    : AddProduct<2>(g, tile, which, count, at);
  }
};

void RunGradientOfQueries(const AttentionGradientArgs& args, int64_t block,
                          const AttentionRange& range, float* workspace) {
  const AmxScope scope;
  Workspace space(workspace);
  RunQueryGradient<AmxGradient>(Gradient(args, block, range, space));
}

void RunGradientOfKeys(const AttentionGradientArgs& args, int64_t block,
                       const AttentionRange& range, float* workspace) {
  const AmxScope scope;
  Workspace space(workspace);
  RunKeyGradient<AmxGradient>(Gradient(args, block, range, space));
}
