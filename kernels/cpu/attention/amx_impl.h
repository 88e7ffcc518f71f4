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
// Matrix unit and vectors work side by side, on different row tiles: while one is softened, a
// little in each step of the tile products, the one before gets its values and the one after
// its scores.
//
// Included by attention/amx.cc inside an unnamed namespace, after common/vec_impl.h and
// common/amx_impl.h and under the same rules.

constexpr int64_t kRowTile = kAmxRows;
constexpr int64_t kKeyStep = kAmxCols;
constexpr int64_t kKeyUnit = kAmxDepth;
constexpr int64_t kTilesAtOnce = 2;
constexpr bool kEqualTiles = false;  // packed queries come in blocks of 32 rows

#include "attention/common_impl.h"

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

// Writes the weights 2^(score * scale - shift) of a row, of a multiple of 32 keys; those of
// 32 each go to rows of tiles. Returns their sum, in lanes.
TRACEA_INLINE Vec WeighNarrowRow(const float* scores, float scale, int64_t keys,
                                 float shift, BF16* weights) {
  Vec total{}, other{};
  for (int64_t i = 0; i < keys; i += 2 * kLanes, weights += kAmxStepSize) {
    const Vec x[2] = {RoughExp2(Load(scores + i) * scale - shift),
                      RoughExp2(Load(scores + i + kLanes) * scale - shift)};
    total += x[0];
    other += x[1];
    StorePair(x, weights);
  }
  return total + other;
}

int64_t AmxSteps(int64_t depth) { return CeilDiv(depth, kAmxDepth); }

// sums += lhs @ rhs for up to 32 rows and 32 columns; work() is called in each step.
template <int kRowTiles, typename Work = NoWork>
TRACEA_INLINE void AmxPanel(int64_t steps, const BF16* lhs, const BF16* rhs, int64_t cols,
                            float* sums, int64_t stride, bool accumulate,
                            const Work& work = Work()) {
  if (cols > kLanes) {
    AmxProduct<kRowTiles, 2>(steps, PackedLhs(lhs), rhs, sums, stride, accumulate, work);
  } else {
    AmxProduct<kRowTiles, 1>(steps, PackedLhs(lhs), rhs, sums, stride, accumulate, work);
  }
}

constexpr int64_t kRowsComing = 8;  // that are asked for early: heads lie far apart

// rows x dim, each row found by `row_of`, as blocks of 32 rows of an AMX lhs.
template <typename RowOf>
TRACEA_INLINE void PackAmxRows(const RowOf& row_of, int64_t rows, int64_t dim,
                               BF16* packed) {
  const int64_t block = AmxSteps(dim) * kAmxStepSize;
  for (int64_t i = 0; i < RoundUp(rows, kAmxRows); ++i) {
    const bool exists = i < rows;
    const BF16* row = (const BF16*)row_of(exists ? i : 0);
    if (i + kRowsComing < rows) PrefetchBytes(row_of(i + kRowsComing), dim * 2);
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

  static void UpdateBlock(const Forward& f, int64_t j0, int64_t count, KeyFetch next);
};

// A row tile and what it sees of a block of keys, on the way through the three stages.
struct AmxStage {
  RowTile tile{0, 0};
  Interval at{0, 0};
  int turn = 0;  // which of two buffers of scores, and of weights in bf16, are its own

  bool is_empty() const { return tile.rows == 0; }
};

// The row tiles of a task on their way through one block of keys.
struct AmxPipeline {
  const Forward& f;
  int64_t j0, count;       // of the block
  AmxStage last, current;  // to get its values; to be softened
  int64_t done = 0;        // of `current`: rows that were looked through, and weighed
  SoftmaxRows softmax{};

  float* Scores(const AmxStage& s) const { return f.scores + s.turn * kRowTile * f.block; }
  BF16* Weights(const AmxStage& s) const {
    return (BF16*)f.weights + s.turn * kRowTile * f.block;
  }

  float scale() const { return f.args.scale * kLog2E; }

  // Whether scores are scaled as they become weights, not before. A bias is added to what
  // was scaled; a scale of zero or below would turn what forbids a key into something else.
  bool ScalesLate() const { return !f.args.bias && !f.args.mask && scale() > 0; }

  // Keys of `current`, with the padding.
  int64_t Keys() const { return RoundUp(current.at.hi - current.at.lo, kAmxDepth); }

  // Row i of `rows` from `first` on, of `current`.
  TRACEA_INLINE void LookThrough(int64_t first, int64_t i, int64_t rows) {
    const int64_t row = current.tile.first + first;
    float* scores = Scores(current) + (first + i) * f.block;
    if (!ScalesLate()) ScaleRow(scores, Keys(), scale());
    MaskRow(f, row + i, j0 + current.at.lo, scores, current.at.hi - current.at.lo);
    softmax.TakeMaximum(i, scores, Keys() / kLanes);
    if (i + 1 == rows) softmax.Shift(rows, ScalesLate() ? scale() : 1.0f, f.max + row);
  }

  // The same row's scores become weights; its sums are scaled to what is subtracted now.
  TRACEA_INLINE void Weigh(int64_t first, int64_t i, int64_t rows) {
    const int64_t row = current.tile.first + first;
    const float alpha = softmax.alpha[i];
    if (alpha != 1.0f) ScaleRow(f.sums + (row + i) * f.width, f.width, alpha);
    const Vec total = WeighNarrowRow(
        Scores(current) + (first + i) * f.block, ScalesLate() ? scale() : 1.0f, Keys(),
        softmax.shift[i], Weights(current) + (first + i) * kAmxDepth);
    softmax.AddWeights(i, total);
    if (i + 1 == rows) softmax.Finish(rows, f.sum + row);
  }

  // Rows are looked through and weighed in groups of kLanes.
  __attribute__((noinline)) void SoftenRow() {
    const int64_t first = done / (2 * kLanes) * kLanes, turn = done - 2 * first;
    const int64_t rows = Min(kLanes, current.tile.rows - first);
    ++done;
    turn < rows ? LookThrough(first, turn, rows) : Weigh(first, turn - rows, rows);
  }

  TRACEA_INLINE void Soften(int64_t most) {
    const int64_t end = Min(done + most, 2 * current.tile.rows);
    while (done < end) SoftenRow();
  }

  int64_t StepsOfScores(const AmxStage& s) const {
    return CeilDiv(s.at.hi - s.at.lo, kAmxCols) * AmxSteps(f.args.head_dim);
  }
  int64_t StepsOfValues(const AmxStage& s) const {
    return AmxSteps(s.at.hi - s.at.lo) * CeilDiv(f.args.head_dim, kAmxCols);
  }

  template <int kRowTiles>
  TRACEA_INLINE void ComputeScores(const AmxStage& s, int64_t share) {
    const int64_t steps = AmxSteps(f.args.head_dim), block = steps * kAmxStepSize;
    const BF16* lhs = (const BF16*)f.queries + s.tile.first / kAmxRows * block;
    const BF16* rhs = (const BF16*)f.keys + s.at.lo / kAmxCols * block;
    float* scores = Scores(s);
    if (kRowTiles == 2 && steps == 2) {
      const int64_t panels = CeilDiv(s.at.hi - s.at.lo, kAmxCols);
      return AmxShallowProducts(lhs, rhs, panels, scores, f.block,
                                [&](int64_t) { Soften(share); });
    }
    for (int64_t c = s.at.lo; c < s.at.hi; c += kAmxCols, rhs += block) {
      AmxPanel<kRowTiles>(steps, lhs, rhs, kAmxCols, scores, f.block, false,
                          [&](int64_t) { Soften(share); });
      scores += kAmxCols;
    }
  }

  template <int kRowTiles>
  TRACEA_INLINE void AddValues(const AmxStage& s, int64_t share) {
    const int64_t panel = AmxSteps(count) * kAmxStepSize, dim = f.args.head_dim;
    const BF16* values = (const BF16*)f.values + s.at.lo / kAmxDepth * kAmxStepSize;
    float* sums = f.sums + s.tile.first * f.width;
    for (int64_t d = 0; d < dim; d += kAmxCols, values += panel) {
      AmxPanel<kRowTiles>(AmxSteps(s.at.hi - s.at.lo), Weights(s), values, dim - d,
                          sums + d, f.width, true, [&](int64_t) { Soften(share); });
    }
  }

  // All move on by a stage; `coming`, which may be empty, enters the first one.
  void Advance(AmxStage coming) {
    coming.turn = current.turn ^ 1;
    const int64_t steps = StepsOfValues(last) + StepsOfScores(coming);
    const int64_t share = steps > 0 ? CeilDiv(2 * current.tile.rows, steps) : 0;
    done = 0;
    if (!last.is_empty()) {
      last.tile.rows <= 16 ? AddValues<1>(last, share) : AddValues<2>(last, share);
    }
    if (!coming.is_empty()) {
      coming.tile.rows <= 16 ? ComputeScores<1>(coming, share)
                             : ComputeScores<2>(coming, share);
    }
    Soften(2 * current.tile.rows);
    last = current;
    current = coming;
  }
};

void AmxKernel::UpdateBlock(const Forward& f, int64_t j0, int64_t count, KeyFetch next) {
  PackKeys(f, j0, count);
  AmxPipeline pipeline{f, j0, count, {}, {}};
  ForSeeingTiles(f, j0, count, next, [&](RowTile tile, Interval at) {
    pipeline.Advance({tile, at});
  });
  pipeline.Advance({});
  pipeline.Advance({});
}

void RunAttention(const AttentionArgs& args, int64_t block_kv,
                  const AttentionRange& range, float* workspace) {
  const AmxScope scope;
  Workspace space(workspace);
  RunForward<AmxKernel>(Forward(args, block_kv, range, space));
}
