// Attention on the register tiles of the matrix product, for every dtype.
//
//   pack q, scaled                       -> row tiles [dim / kChunk][rows][kChunk]
//   for key block                        (block_kv keys, of those that a row may see)
//     pack k transposed                  -> panels [block_kv / kTileN][dim][kTileN]
//     pack v                             -> panels [dim / kTileN][block_kv][kTileN]
//     for row tile                       (up to kTileM rows)
//       scores = q @ k' by micro-kernel; bias, masks
//       weights = online softmax(scores) -> chunks of a micro-kernel's lhs
//       sums = sums * alpha + weights @ v by micro-kernel
//   out = sums / sum of weights
//
// Scores are in base 2: scale * log2(e) is folded into q. The blocks are cut at multiples
// of block_kv, wherever a task's rows begin to see keys: other cuts would change bits.
//
// Included by attention_<isa>.cc inside an unnamed namespace, after vec_impl.h and under
// the same rules. The includer defines TRACEA_TILE_M.

#include "gemm_tile_impl.h"
#include "gemm_pack_impl.h"

constexpr int64_t kRowTile = kTileM;
constexpr int64_t kKeyStep = kTileN;
constexpr int64_t kKeyUnit = kLanes;
constexpr bool kEqualTiles = true;

#include "attention_common_impl.h"

// One row of the online softmax. `scores` has `vecs` vectors. Writes the weights
// 2^(score - max) in chunks of the micro-kernel's lhs, `chunk_step` apart; updates the
// row's maximum and its sum of weights; returns what earlier sums must be scaled by.
TRACEA_INLINE float SoftmaxRow(const float* scores, int64_t vecs, float* weights,
                               int64_t chunk_step, float* max, float* sum) {
  Vec most = Splat(*max);
  for (int64_t i = 0; i < vecs; ++i) most = Maximum(Load(scores + i * kLanes), most);
  const float new_max = Fold<Largest>(most);
  const Vec shift = Splat(new_max);
  constexpr int64_t kPerChunk = kChunk / kLanes;
  Vec total{};
  for (int64_t i = 0; i < vecs; ++i) {
    const Vec weight = Exp2(Load(scores + i * kLanes) - shift);
    total += weight;
    Store(weights + (i / kPerChunk) * chunk_step + (i % kPerChunk) * kLanes, weight);
  }
  const float alpha = Exp2(Splat(*max - new_max))[0];
  *sum = *sum * alpha + Fold<Plus>(total);
  *max = new_max;
  return alpha;
}

// rows x dim, each row found by `row_of`, times `scale`; as lhs of the micro-kernel.
template <typename T, typename RowOf>
TRACEA_INLINE void PackRows(const RowOf& row_of, int64_t rows, int64_t dim, float scale,
                            float* packed) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = row_of(i);
    for (int64_t p = 0; p < dim; p += kLanes) {
      float* to = packed + (p / kChunk * rows + i) * kChunk + p % kChunk;
      Store(to, LoadUpTo(row + p, dim - p) * scale);
    }
  }
}

// out = lhs @ rhs, or out += lhs @ rhs if `accumulate`, for one row tile of packed lhs
// and for panels of packed rhs, `panel` apart.
TRACEA_INLINE void TileProduct(int64_t rows, int64_t depth, const float* lhs,
                               const float* rhs, int64_t panel, int64_t cols, float* out,
                               int64_t stride, bool accumulate) {
  for (int64_t c = 0; c < cols; c += kTileN, out += kTileN, rhs += panel) {
    const MicroKernelFn micro = kMicroKernels.table[cols - c > kLanes][rows - 1];
    micro(depth, lhs, rhs, accumulate ? out : nullptr, stride, out, stride, nullptr);
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
    const int64_t dim = f.args.head_dim, keys = at.hi - at.lo;
    TileProduct(tile.rows, dim, f.queries + tile.first * f.depth, f.keys + at.lo * dim,
                dim * kTileN, keys, f.scores, f.block, false);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.first + i;
      float* scores = f.scores + i * f.block;
      MaskRow(f, row, j0 + at.lo, scores, keys);
      const float alpha =
          SoftmaxRow(scores, CeilDiv(keys, kLanes), f.weights + i * kChunk,
                     tile.rows * kChunk, f.max + row, f.sum + row);
      if (alpha != 1.0f) ScaleRow(f.sums + row * f.width, f.width, alpha);
    }
    TileProduct(tile.rows, keys, f.weights, f.values + at.lo * kTileN, count * kTileN,
                dim, f.sums + tile.first * f.width, f.width, true);
  }
};

void RunAttention(const AttentionArgs& args, int64_t block_kv,
                  const AttentionRange& range, float* workspace) {
  const Forward f(args, block_kv, range, workspace);
  switch (args.type) {
    case DType::kF32:
      return RunForward<F32, Tiled<F32>>(f);
    case DType::kBF16:
      return RunForward<BF16, Tiled<BF16>>(f);
    case DType::kF16:
      return RunForward<F16, Tiled<F16>>(f);
  }
}
