// Attention for one instruction set, on the register tiles of the matrix product.
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

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

#include "gemm_tile_impl.h"
#include "gemm_pack_impl.h"
#include "attention_softmax_impl.h"

TRACEA_INLINE int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// The keys that query i of example b may see, masks apart.
Interval KeysOf(const AttentionArgs& args, int64_t b, int64_t i) {
  if (args.q_lengths && i >= args.q_lengths[b]) return {0, 0};
  Interval keys{i - args.left, i + args.right + 1};
  if (args.causal) keys.hi = Min(keys.hi, i + 1);
  if (args.kv_lengths) keys.hi = Min(keys.hi, args.kv_lengths[b]);
  return Intersect(keys, {0, args.kv_len});
}

// The rows of a task: queries of the heads that share one head of keys.
struct Rows {
  const AttentionArgs& args;
  const AttentionRange& range;

  int64_t count() const { return range.row1 - range.row0; }
  int64_t query(int64_t row) const { return (range.row0 + row) / args.group(); }
  int64_t head(int64_t row) const {
    return range.kv_head * args.group() + (range.row0 + row) % args.group();
  }
  // Element offset of the row in q and out.
  int64_t offset(int64_t row) const {
    const int64_t at = (range.batch * args.q_len + query(row)) * args.heads + head(row);
    return at * args.head_dim;
  }
  int64_t lse_offset(int64_t row) const {
    return (range.batch * args.heads + head(row)) * args.q_len + query(row);
  }
  Interval keys(int64_t row) const { return KeysOf(args, range.batch, query(row)); }
};

// Element offset of key j of the task's head, in k and v.
int64_t KeyOffset(const AttentionArgs& args, const AttentionRange& range, int64_t j) {
  return ((range.batch * args.kv_len + j) * args.kv_heads + range.kv_head) *
         args.head_dim;
}

// Row tiles of a task: as equal as possible.
struct RowTile {
  int64_t first, rows;
};

template <typename Body>
TRACEA_INLINE void ForRowTiles(int64_t count, const Body& body) {
  int64_t left = CeilDiv(count, kTileM);
  for (int64_t i = 0; i < count; --left) {
    const int64_t rows = CeilDiv(count - i, left);
    body(RowTile{i, rows});
    i += rows;
  }
}

// Parts of the workspace; their sizes are those of `PlanAttention`.
struct Forward {
  const AttentionArgs& args;
  const AttentionRange& range;
  Rows rows;
  int64_t block, depth, width;  // keys of a block; head_dim in chunks, in panels
  float *keys, *values, *queries, *sums, *scores, *weights, *max, *sum;
  Interval* seen;  // by each row

  Forward(const AttentionArgs& a, int64_t block_kv, const AttentionRange& r,
          float* workspace)
      : args(a), range(r), rows{a, r}, block(block_kv) {
    depth = RoundUp(a.head_dim, kChunk);
    width = RoundUp(a.head_dim, kTileN);
    const int64_t count = RoundUp(rows.count(), kChunk);
    keys = workspace;
    values = keys + block * depth;
    queries = values + block * width;
    sums = queries + count * depth;
    scores = sums + count * width;
    weights = scores + kTileM * block;
    max = weights + kTileM * block;
    sum = max + count;
    seen = (Interval*)(sum + count);
  }
};

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

template <typename T>
void PackQueries(const Forward& f) {
  const T* q = (const T*)f.args.q;
  const float scale = f.args.scale * kLog2E;
  ForRowTiles(f.rows.count(), [&](RowTile t) {
    const auto row_of = [&](int64_t i) { return q + f.rows.offset(t.first + i); };
    PackRows<T>(row_of, t.rows, f.args.head_dim, scale, f.queries + t.first * f.depth);
  });
}

// Scores of a row tile with the keys [j0 + at.lo, j0 + at.hi) of a packed block; at.lo is
// a multiple of kTileN.
TRACEA_INLINE void ComputeScores(const Forward& f, RowTile tile, Interval at) {
  const float* lhs = f.queries + tile.first * f.depth;
  const int64_t dim = f.args.head_dim;
  for (int64_t c = at.lo; c < at.hi; c += kTileN) {
    const MicroKernelFn micro =
        kMicroKernels.table[at.hi - c > kLanes][tile.rows - 1];
    micro(dim, lhs, f.keys + c * dim, nullptr, 0, f.scores + (c - at.lo), f.block);
  }
}

// The row's bias and masks, on scores of the keys [j0, j0 + count).
TRACEA_INLINE void MaskRow(const Forward& f, int64_t row, int64_t j0, float* scores,
                           int64_t count) {
  const AttentionArgs& args = f.args;
  if (args.bias || args.mask) {
    const int64_t b = f.range.batch, h = f.rows.head(row), i = f.rows.query(row);
    if (args.bias) AddBias(args, b, h, i, j0, scores, count);
    if (args.mask) ApplyMask(args, b, h, i, j0, scores, count);
  }
  const Interval keys = f.seen[row];
  const Interval own = {keys.lo - j0, Min(keys.hi - j0, count)};
  if (own.lo <= 0 && own.hi >= RoundUp(count, kLanes)) return;
  ForbidOutside(own, scores, RoundUp(count, kLanes));
}

TRACEA_INLINE void ScaleRow(float* row, int64_t width, float scale) {
  for (int64_t d = 0; d < width; d += kLanes) Store(row + d, Load(row + d) * scale);
}

// One row tile with the keys [j0 + at.lo, j0 + at.hi) of a packed block of `count`.
void UpdateTile(const Forward& f, RowTile tile, int64_t j0, int64_t count, Interval at) {
  ComputeScores(f, tile, at);
  const int64_t keys = at.hi - at.lo;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.first + i;
    float* scores = f.scores + i * f.block;
    MaskRow(f, row, j0 + at.lo, scores, keys);
    const float alpha =
        SoftmaxRow(scores, CeilDiv(keys, kLanes), f.weights + i * kChunk,
                   tile.rows * kChunk, f.max + row, f.sum + row);
    if (alpha != 1.0f) ScaleRow(f.sums + row * f.width, f.width, alpha);
  }
  for (int64_t d = 0; d < f.args.head_dim; d += kTileN) {
    const MicroKernelFn micro =
        kMicroKernels.table[f.args.head_dim - d > kLanes][tile.rows - 1];
    float* sums = f.sums + tile.first * f.width + d;
    const float* values = f.values + d * count + at.lo * kTileN;
    micro(keys, f.weights, values, sums, f.width, sums, f.width);
  }
}

template <typename T>
void UpdateBlock(const Forward& f, int64_t j0, int64_t count) {
  const AttentionArgs& args = f.args;
  const int64_t offset = KeyOffset(args, f.range, j0);
  const int64_t stride = args.kv_heads * args.head_dim;
  PackRhsTransposed((const T*)args.k + offset, stride, args.head_dim, count, f.keys);
  PackRhs((const T*)args.v + offset, stride, count, args.head_dim, f.values);
  ForRowTiles(f.rows.count(), [&](RowTile tile) {
    Interval keys{0, 0};
    for (int64_t i = 0; i < tile.rows; ++i) keys = Hull(keys, f.seen[tile.first + i]);
    keys = Intersect(keys, {j0, j0 + count});
    if (keys.lo == keys.hi) return;
    UpdateTile(f, tile, j0, count, {(keys.lo - j0) / kTileN * kTileN, keys.hi - j0});
  });
}

// The mean of all values of the task's head.
template <typename T>
void MeanOfValues(const Forward& f, float* mean) {
  for (int64_t d = 0; d < f.width; ++d) mean[d] = 0;
  const T* v = (const T*)f.args.v;
  for (int64_t j = 0; j < f.args.kv_len; ++j) {
    const T* row = v + KeyOffset(f.args, f.range, j);
    for (int64_t d = 0; d < f.args.head_dim; d += kLanes) {
      Store(mean + d, Load(mean + d) + LoadUpTo(row + d, f.args.head_dim - d));
    }
  }
  ScaleRow(mean, f.width, 1.0f / (float)f.args.kv_len);
}

float Log2(float x) { return __builtin_log2f(x); }

void StoreElement(void* data, DType type, int64_t i, float x) {
  switch (type) {
    case DType::kF32:
      return StorePartial((F32*)data + i, Splat(x), 1);
    case DType::kBF16:
      return StorePartial((BF16*)data + i, Splat(x), 1);
    case DType::kF16:
      return StorePartial((F16*)data + i, Splat(x), 1);
  }
}

// XLA's log-sum-exp of forbidden scores only, which it replaces by a finite number.
constexpr float kLseOfNone = 0.7f * kLowest;

template <typename T>
void FinishRows(const Forward& f) {
  const AttentionArgs& args = f.args;
  float* mean = f.scores;  // their buffer is at least as wide
  bool has_mean = false;
  for (int64_t row = 0; row < f.rows.count(); ++row) {
    const bool is_padding =
        args.q_lengths && f.rows.query(row) >= args.q_lengths[f.range.batch];
    const bool sees_none = f.sum[row] == 0.0f;
    if (sees_none && !is_padding && !has_mean) {
      MeanOfValues<T>(f, mean);
      has_mean = true;
    }
    const float* from = sees_none && !is_padding ? mean : f.sums + row * f.width;
    const float scale = sees_none ? 1.0f : 1.0f / f.sum[row];
    T* out = (T*)args.out + f.rows.offset(row);
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      StoreUpTo(out + d, Load(from + d) * scale, args.head_dim - d);
    }
    if (args.lse) {
      const float lse = (f.max[row] + Log2(f.sum[row])) * kLn2;
      StoreElement(args.lse, args.lse_type, f.rows.lse_offset(row),
                   sees_none ? kLseOfNone : lse);
    }
  }
}

template <typename T>
void RunForward(const AttentionArgs& args, int64_t block_kv, const AttentionRange& range,
                float* workspace) {
  const Forward f(args, block_kv, range, workspace);
  PackQueries<T>(f);
  Interval keys{0, 0};
  for (int64_t row = 0; row < f.rows.count(); ++row) {
    f.seen[row] = f.rows.keys(row);
    keys = Hull(keys, f.seen[row]);
    f.max[row] = kLowest;
    f.sum[row] = 0;
    for (int64_t d = 0; d < f.width; d += kLanes) Store(f.sums + row * f.width + d, Vec{});
  }
  for (int64_t j = keys.lo / block_kv * block_kv; j < keys.hi; j += block_kv) {
    UpdateBlock<T>(f, j, Min(block_kv, keys.hi - j));
  }
  FinishRows<T>(f);
}

void RunAttention(const AttentionArgs& args, int64_t block_kv, const AttentionRange& range,
                  float* workspace) {
  switch (args.type) {
    case DType::kF32:
      return RunForward<F32>(args, block_kv, range, workspace);
    case DType::kBF16:
      return RunForward<BF16>(args, block_kv, range, workspace);
    case DType::kF16:
      return RunForward<F16>(args, block_kv, range, workspace);
  }
}
