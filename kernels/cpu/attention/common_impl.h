// What all attention kernels share: rows and the keys they see, workspace, masking, the
// loop over blocks of keys and the end of a row.
//
// Included by attention/vectors_impl.h and attention/amx_impl.h, which define
//   kRowTile     rows of a tile
//   kEqualTiles  whether a task's tiles are as equal as possible, or all but one whole
//   kTilesAtOnce tiles whose scores are kept side by side in the forward pass
//   kKeyStep     the keys that a tile sees in a block begin at a multiple of it
//   kKeyUnit     their number is padded to a multiple of it

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

#include "attention/softmax_impl.h"
#include "common/workspace_impl.h"

constexpr int64_t kPad = 32;  // the workspace pads rows and head_dim to it
static_assert(kPad % kRowTile == 0 || kEqualTiles, "whole tiles of rows must have room");
static_assert(kPad % kKeyUnit == 0 && kAttentionBlock % kPad == 0,
              "padded keys must have room in a block");
static_assert(kTilesAtOnce * kRowTile * kAttentionBlock >= kMaxHeadDim,
              "the mean of all values must have room among the scores");

TRACEA_INLINE int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

#include "attention/operand_impl.h"

// The keys that query i of example b may see, masks apart.
Interval KeysOf(const AttentionArgs& args, int64_t b, int64_t i) {
  if (args.q_lengths && i >= args.q_lengths[b]) return {0, 0};
  Interval keys{i - args.left, i + args.right + 1};
  if (args.causal) keys.hi = Min(keys.hi, i + 1);
  if (args.kv_lengths) keys.hi = Min(keys.hi, args.kv_lengths[b]);
  return Intersect(keys, {0, args.kv_len});
}

float Log2(float x) { return __builtin_log2f(x); }

#include "attention/by_key_impl.h"

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
  bool is_padding(int64_t row) const {
    return args.q_lengths && query(row) >= args.q_lengths[range.batch];
  }
  Interval keys(int64_t row) const { return KeysOf(args, range.batch, query(row)); }
  Query at(int64_t row) const { return {args, range.batch, head(row), query(row)}; }
};

// Element offset of key j of the task's head, in k and v.
int64_t KeyOffset(const AttentionArgs& args, const AttentionRange& range, int64_t j) {
  return ((range.batch * args.kv_len + j) * args.kv_heads + range.kv_head) *
         args.head_dim;
}

// Row tiles of a task: as equal as possible, or all but the last one whole.
struct RowTile {
  int64_t first, rows;
};

template <typename Body>
TRACEA_INLINE void ForRowTiles(int64_t count, const Body& body) {
  int64_t left = CeilDiv(count, kRowTile);
  for (int64_t i = 0; i < count; --left) {
    const int64_t rest = count - i;
    const int64_t rows = kEqualTiles ? CeilDiv(rest, left) : Min(kRowTile, rest);
    body(RowTile{i, rows});
    i += rows;
  }
}

// A task of the forward pass, and the buffers of it.
struct Forward {
  const AttentionArgs& args;
  const AttentionRange& range;
  Rows rows;
  int64_t block, depth, width;  // keys of a block; head_dim, padded
  float *keys, *values, *queries, *sums, *scores, *weights, *max, *sum;
  Interval* seen;  // by each row

  Forward(const AttentionArgs& a, int64_t block_kv, const AttentionRange& r,
          Workspace& space)
      : args(a), range(r), rows{a, r}, block(block_kv) {
    depth = width = RoundUp(a.head_dim, kPad);
    const int64_t count = RoundUp(rows.count(), kPad);
    keys = space.Take<float>(block * depth);
    values = space.Take<float>(block * width);
    queries = space.Take<float>(count * depth);
    sums = space.Take<float>(count * width);
    scores = space.Take<float>(kTilesAtOnce * kRowTile * block);
    weights = space.Take<float>(kRowTile * block);
    max = space.Take<float>(count);
    sum = space.Take<float>(count);
    seen = space.Take<Interval>(count);
  }
};

int64_t ForwardBytes(const AttentionArgs& args, int64_t block, int64_t rows) {
  return BytesOf<Forward>(args, block, AttentionRange{0, 0, 0, rows});
}

// The row's bias and masks, on scores of the keys [j0, j0 + count). Those of the padding,
// up to a multiple of kKeyUnit, become forbidden.
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
  const int64_t padded = RoundUp(count, kKeyUnit);
  if (own.lo > 0 || own.hi < padded) ForbidOutside(own, scores, padded);
}

TRACEA_INLINE void ScaleRow(float* row, int64_t width, float scale) {
  for (int64_t d = 0; d < width; d += kLanes) Store(row + d, Load(row + d) * scale);
}

// The mean of all values of the task's head.
void MeanOfValues(const Forward& f, float* mean) {
  for (int64_t d = 0; d < f.width; ++d) mean[d] = 0;
  const AttentionArgs& args = f.args;
  for (int64_t j = 0; j < args.kv_len; ++j) {
    AddRow(args.type, At(args.type, args.v, KeyOffset(args, f.range, j)), args.head_dim,
           mean);
  }
  ScaleRow(mean, f.width, 1.0f / (float)args.kv_len);
}

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

// A row of results, its sums not yet divided by `total`.
struct Result {
  const float* sums;
  float total, lse;
};

// More than the weights of all keys are together: each is at most 2^kMaxSlack, unless rounding
// of large scores decides.
constexpr float kMostWeight = 0x1p64f;

// Rows whose sum of weights is zero, too large or NaN.
class RareRows {
 public:
  explicit RareRows(const Forward& f) : f_(f) {}

  Result Finish(int64_t row) {
    float* sums = f_.sums + row * f_.width;
    const Query query = f_.rows.at(row);
    const Weights weights = WeightsOf(query, &worst_);
    if (!weights.sees_any && !f_.rows.is_padding(row)) return {Mean(), 1, kLseOfNone};
    const bool is_nan = weights.sees_any && !IsFinite(weights.most);
    for (int64_t d = 0; d < f_.width; ++d) sums[d] = is_nan ? __builtin_nanf("") : 0;
    if (!weights.sees_any) return {sums, 1, kLseOfNone};
    if (!is_nan) AddValues(query, weights, sums);
    return {sums, 1, weights.lse()};
  }

 private:
  void AddValues(const Query& query, const Weights& weights, float* sums) const {
    query.ForKeys({0, f_.args.kv_len}, [&](int64_t j) {
      const AttentionArgs& args = f_.args;
      AddScaled(args.type, weights.Of(query.Score(j)),
                At(args.type, args.v, query.key_offset(j)), args.head_dim, sums);
      return true;
    });
  }

  const float* Mean() {
    if (!has_mean_) MeanOfValues(f_, f_.scores);
    has_mean_ = true;
    return f_.scores;
  }

  const Forward& f_;
  int64_t worst_ = -1;
  bool has_mean_ = false;
};

void FinishRows(const Forward& f) {
  const AttentionArgs& args = f.args;
  RareRows rare(f);
  for (int64_t row = 0; row < f.rows.count(); ++row) {
    const float sum = f.sum[row];
    Result result{f.sums + row * f.width, sum, (f.max[row] + Log2(sum)) * kLn2};
    if (!(sum > 0 && sum < kMostWeight)) result = rare.Finish(row);
    const float scale = 1.0f / result.total;
    StoreScaled(args.type, result.sums, scale,
                At(args.type, args.out, f.rows.offset(row)), args.head_dim);
    if (args.lse) {
      StoreElement(args.lse, args.lse_type, f.rows.lse_offset(row), result.lse);
    }
  }
}

// Brings rows of some arrays closer that are packed soon. Those of one head lie far apart
// from token to token, beyond what processors foresee.
template <int kArrays>
struct RowFetch {
  const char* rows[kArrays] = {};  // the next of each array
  int64_t stride = 0, bytes = 0, left = 0;

  TRACEA_INLINE void Fetch(int64_t count) {
    for (; count > 0 && left > 0; --count, --left) {
      for (const char*& row : rows) {
        PrefetchBytes(row, bytes);
        row += stride;
      }
    }
  }

  // So many that all are there after the row tiles of a task.
  TRACEA_INLINE int64_t Share(int64_t task_rows) const {
    return CeilDiv(left, CeilDiv(task_rows, kRowTile));
  }
};

using KeyFetch = RowFetch<2>;  // of keys and values

// Those of the block of a task's keys that begins with j, if it is before the end.
KeyFetch FetchOfKeys(const AttentionArgs& args, const AttentionRange& range, int64_t j,
                     int64_t block, int64_t end) {
  if (j >= end) return {};
  const int64_t at = KeyOffset(args, range, j), size = ElementSize(args.type);
  return {{(const char*)At(args.type, args.k, at), (const char*)At(args.type, args.v, at)},
          args.kv_heads * args.head_dim * size, args.head_dim * size,
          Min(block, end - j)};
}

// Calls body(tile, at) for each row tile that sees some of the block of keys [j0, j0 +
// count): [j0 + at.lo, j0 + at.hi), at.lo a multiple of kKeyStep. Meanwhile `next` comes
// closer.
template <typename Body>
TRACEA_INLINE void ForSeeingTiles(const Forward& f, int64_t j0, int64_t count,
                                  KeyFetch next, const Body& body) {
  const int64_t share = next.Share(f.rows.count());
  ForRowTiles(f.rows.count(), [&](RowTile tile) {
    next.Fetch(share);
    Interval keys{0, 0};
    for (int64_t i = 0; i < tile.rows; ++i) keys = Hull(keys, f.seen[tile.first + i]);
    keys = Intersect(keys, {j0, j0 + count});
    if (keys.lo == keys.hi) return;
    body(tile, Interval{(keys.lo - j0) / kKeyStep * kKeyStep, keys.hi - j0});
  });
}

// Kernel::PackQueries(f) prepares the rows; Kernel::UpdateBlock(f, j0, count, next) lets
// them see the keys [j0, j0 + count), which it packs, as `next` comes closer.
template <typename Kernel>
void RunForward(const Forward& f) {
  Kernel::PackQueries(f);
  Interval keys{0, 0};
  for (int64_t row = 0; row < f.rows.count(); ++row) {
    f.seen[row] = f.rows.keys(row);
    keys = Hull(keys, f.seen[row]);
    f.max[row] = kLowest;
    f.sum[row] = 0;
    float* sums = f.sums + row * f.width;
    for (int64_t d = 0; d < f.width; d += kLanes) Store(sums + d, Vec{});
  }
  for (int64_t j = keys.lo / f.block * f.block; j < keys.hi; j += f.block) {
    const auto next = FetchOfKeys(f.args, f.range, j + f.block, f.block, keys.hi);
    Kernel::UpdateBlock(f, j, Min(f.block, keys.hi - j), next);
  }
  FinishRows(f);
}
