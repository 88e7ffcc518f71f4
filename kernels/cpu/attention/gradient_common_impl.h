// What all kernels of attention's gradient share.
//
// With the weights p = 2^(s - lse), where s are the scores in base 2, and with delta,
// each query's sum of do * o:
//
//   dp = do @ v';   ds = p * (dp - delta)
//   dq = scale * ds @ k;   dk = scale * ds' @ q;   dv = p' @ do
//
// One function computes p and ds of a row tile; in the pass over queries the rows are
// queries, so that lse and delta belong to rows, in the pass over keys the rows are keys,
// and they belong to columns. Sums stay with the rows, while the columns come in blocks:
//
//   pass     rows packed as lhs   columns packed as rhs   sums
//   queries  q, do                k', v', k               dq += ds @ k
//   keys     k, v                 q', do', q, do          dk += ds' @ q, dv += p' @ do
//
// A Kernel has
//   PackLhs(g, row_of, scale, to)   the rows of a task; a scale only for its own use
//   PackTransposed(...), PackStored(...)   columns as rhs, as PackRhs does
//   Products(g, tile, at)           scores and dp of a row tile
//   Row<kByRow>(g, i, rows, row, at)   weights and ds of its row i, `row` of the task
//   Accumulate(g, tile, which, count, at)
//                                   sums[which] += (ds or weights) @ stored[which]
// with columns [at.lo, at.hi) of a packed block of `count`, at.lo a multiple of kKeyStep.
//
// Included by attention/gradient_vectors_impl.h and attention/gradient_amx_impl.h.

// The queries that see key j of example b, masks apart.
Interval QueriesOf(const AttentionArgs& args, int64_t b, int64_t j) {
  if (args.kv_lengths && j >= args.kv_lengths[b]) return {0, 0};
  Interval queries{j - args.right, j + args.left + 1};
  if (args.causal) queries.lo = Max(queries.lo, j);
  if (args.q_lengths) queries.hi = Min(queries.hi, args.q_lengths[b]);
  return Intersect(queries, {0, args.q_len});
}

// A task of the gradient, and the buffers of it.
struct Gradient {
  const AttentionGradientArgs& all;
  const AttentionArgs& args;
  const AttentionRange& range;
  Rows rows;  // of the pass over queries
  int64_t block, width;
  float *lhs[2], *sums[2];  // of rows: packed, and results
  float *transposed[2], *stored[2];  // blocks of columns
  float *scores, *dp, *weights, *ds;  // of a row tile
  float *row_lse, *row_delta, *col_lse, *col_delta, *extra;
  float *zeros, *clean[2];  // a row; q and do of some queries without those of blank ones
  Interval* seen;  // columns, by each row

  Gradient(const AttentionGradientArgs& a, int64_t b, const AttentionRange& r,
           Workspace& space)
      : all(a), args(a.forward), range(r), rows{a.forward, r}, block(b) {
    width = RoundUp(args.head_dim, kPad);
    const int64_t count = RoundUp(rows.count(), kPad);
    for (int i = 0; i < 2; ++i) {
      lhs[i] = space.Take<float>(count * width);
      sums[i] = space.Take<float>(count * width);
      transposed[i] = space.Take<float>(block * width);
      stored[i] = space.Take<float>(block * width);
    }
    scores = space.Take<float>(kRowTile * block);
    dp = space.Take<float>(kRowTile * block);
    weights = space.Take<float>(kRowTile * block);
    ds = space.Take<float>(kRowTile * block);
    row_lse = space.Take<float>(count);
    row_delta = space.Take<float>(count);
    col_lse = space.Take<float>(block);
    col_delta = space.Take<float>(block);
    extra = space.Take<float>(width);
    zeros = space.Take<float>(width);
    for (float*& rows_of : clean) rows_of = space.Take<float>(Max(count, block) * width);
    seen = space.Take<Interval>(count);
  }
};

int64_t GradientBytes(const AttentionGradientArgs& args, int64_t block, int64_t rows) {
  return BytesOf<Gradient>(args, block, AttentionRange{0, 0, 0, rows});
}

// Whether a query saw no key, by its log-sum-exp: ours, or XLA's, rounded otherwise.
TRACEA_INLINE bool SawNone(float lse) {
  return Magnitude(lse - kLseOfNone) < -1e-6f * kLseOfNone;
}

// From this log-sum-exp on its own rounding changes a weight by half of it and more.
constexpr float kLargeLse = 8388608;  // 2^23

// What the loops over blocks know of a query. They add nothing to sums where its log-sum-exp
// (in base 2) is infinite: it saw no key, or it is blank. A blank query is computed key by
// key, and its q and do are zeros to the loops, as they may make NaN of weights of 0.
struct LoopQuery {
  float lse, delta;
  bool is_blank;
};

// The sum of do * o of a query.
float DeltaOf(const AttentionGradientArgs& all, const Query& query) {
  const AttentionArgs& args = query.args;
  const int64_t at = query.offset();
  return Dot(args.type, At(args.type, all.dout, at), At(args.type, args.out, at),
             args.head_dim);
}

LoopQuery LoopQueryOf(const AttentionGradientArgs& all, const Query& query, float lse) {
  const float delta = DeltaOf(all, query);
  const bool is_usual = Magnitude(lse) < kLargeLse;
  if (IsFinite(delta) && is_usual) return {lse * kLog2E, delta, false};
  if (IsFinite(delta) && SawNone(lse)) return {kInfinity, delta, false};
  return {kInfinity, 0, true};
}

// Calls body(j, p, ds) with what each key, of those in `among` that a blank query sees, has
// as a weight and as the gradient of its score.
template <typename Body>
void ForKeysOfBlank(const AttentionGradientArgs& all, const Query& query, float lse,
                    Interval among, const Body& body) {
  if (SawNone(lse)) return;
  const AttentionArgs& args = query.args;
  const void* dout = At(args.type, all.dout, query.offset());
  const float delta = DeltaOf(all, query);
  int64_t worst = -1;
  Weights weights{lse, 1, true};
  if (IsFinite(lse) && !(Magnitude(lse) < kLargeLse)) weights = WeightsOf(query, &worst);
  query.ForKeys(among, [&](int64_t j) {
    const void* v = At(args.type, args.v, query.key_offset(j));
    const bool is_nan = !IsFinite(weights.most);
    const float p = is_nan ? __builtin_nanf("") : weights.Of(query.Score(j));
    body(j, p, p * (Dot(args.type, dout, v, args.head_dim) - delta));
    return true;
  });
}

// A blank query's gradient, still to be scaled, added to `dq`.
void AddToBlank(const AttentionGradientArgs& all, const Query& query, float lse,
                float* dq) {
  const AttentionArgs& args = query.args;
  ForKeysOfBlank(all, query, lse, {0, args.kv_len}, [&](int64_t j, float, float ds) {
    AddScaled(args.type, ds, At(args.type, args.k, query.key_offset(j)), args.head_dim,
              dq);
  });
}

// What a blank query gives to the gradients of the keys from `among.lo` on, which lie
// `width` apart, added to them.
void AddFromBlank(const AttentionGradientArgs& all, const Query& query, float lse,
                  Interval among, int64_t width, float* dk, float* dv) {
  const AttentionArgs& args = query.args;
  const void* q = At(args.type, args.q, query.offset());
  const void* dout = At(args.type, all.dout, query.offset());
  ForKeysOfBlank(all, query, lse, among, [&](int64_t j, float p, float ds) {
    const int64_t at = (j - among.lo) * width;
    AddScaled(args.type, ds, q, args.head_dim, dk + at);
    AddScaled(args.type, p, dout, args.head_dim, dv + at);
  });
}

// q and do of neighbouring queries, `stride` apart.
struct QueryRows {
  DType type;
  const void *q, *dout;
  int64_t stride;

  // A copy in g.clean, with zeros where the log-sum-exp is infinite.
  QueryRows Cleaned(const Gradient& g, const float* lse, int64_t count) const {
    const int64_t bytes = ElementSize(type);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = lse[i] == kInfinity ? 0 : g.args.head_dim;
      for (int which = 0; which < 2; ++which) {
        char* to = (char*)g.clean[which] + i * g.width * bytes;
        memcpy(to, At(type, which == 0 ? q : dout, i * stride), size * bytes);
        memset(to + size * bytes, 0, (g.width - size) * bytes);
      }
    }
    return {type, g.clean[0], g.clean[1], g.width};
  }
};

TRACEA_INLINE float SavedLse(const Query& query) {
  const AttentionArgs& args = query.args;
  const int64_t at = (query.b * args.heads + query.h) * args.q_len + query.i;
  return ((const float*)args.lse)[at];
}

// Element offset of a query, in q, o and their gradients.
TRACEA_INLINE int64_t QueryOffset(const AttentionArgs& args, int64_t b, int64_t h,
                                  int64_t i) {
  return ((b * args.q_len + i) * args.heads + h) * args.head_dim;
}

TRACEA_INLINE void ForbidColumns(const Gradient& g, int64_t row, int64_t first,
                                 float* scores, int64_t cols) {
  const Interval seen = g.seen[row];
  const Interval own = {seen.lo - first, Min(seen.hi - first, cols)};
  const int64_t padded = RoundUp(cols, kKeyUnit);
  if (own.lo > 0 || own.hi < padded) ForbidOutside(own, scores, padded);
}

// The part of a block of columns [j0, j0 + count) that a row tile sees, from j0 on.
TRACEA_INLINE Interval SeenOf(const Gradient& g, RowTile tile, int64_t j0,
                              int64_t count) {
  Interval seen{0, 0};
  for (int64_t i = 0; i < tile.rows; ++i) seen = Hull(seen, g.seen[tile.first + i]);
  seen = Intersect(seen, {j0, j0 + count});
  if (seen.lo == seen.hi) return seen;
  return {(seen.lo - j0) / kKeyStep * kKeyStep, seen.hi - j0};
}

TRACEA_INLINE void ClearSums(const Gradient& g) {
  for (float* sums : g.sums) {
    for (int64_t i = 0; i < g.rows.count() * g.width; i += kLanes) Store(sums + i, Vec{});
  }
  for (int64_t d = 0; d < g.width; ++d) g.zeros[d] = 0;
}

void StoreGradient(DType type, const float* from, float scale, const float* extra, void* to,
                   int64_t size) {
  OfType(type, [&](auto t) {
    for (int64_t d = 0; d < size; d += kLanes) {
      const Vec more = extra ? Load(extra + d) : Vec{};
      StoreUpTo((decltype(t)*)to + d, Load(from + d) * scale + more, size - d);
    }
  });
}

// Row `row` of the task is this query. Returns whether it is blank; its dq is complete then.
bool SetRow(const Gradient& g, int64_t row, const Query& query) {
  const float lse = SavedLse(query);
  const LoopQuery known = LoopQueryOf(g.all, query, lse);
  g.row_lse[row] = known.lse;
  g.row_delta[row] = known.delta;
  if (known.is_blank) AddToBlank(g.all, query, lse, g.sums[0] + row * g.width);
  return known.is_blank;
}

// ---- Queries --------------------------------------------------------------------------

template <typename Kernel>
Interval PrepareQueries(const Gradient& g) {
  const AttentionArgs& args = g.args;
  Interval all{0, 0};
  for (int64_t row = 0; row < g.rows.count(); ++row) {
    g.seen[row] = g.rows.keys(row);
    SetRow(g, row, g.rows.at(row));
    all = Hull(all, g.seen[row]);
  }
  const auto of = [&](const void* x, int64_t i) {
    return g.row_lse[i] == kInfinity ? g.zeros : At(args.type, x, g.rows.offset(i));
  };
  const auto q_of = [&](int64_t i) { return of(args.q, i); };
  const auto do_of = [&](int64_t i) { return of(g.all.dout, i); };
  Kernel::PackLhs(g, q_of, args.scale * kLog2E, g.lhs[0]);
  Kernel::PackLhs(g, do_of, 1.0f, g.lhs[1]);
  return all;
}

template <typename Kernel>
void QueryTileGradient(const Gradient& g, RowTile tile, int64_t j0, int64_t count,
                       Interval at) {
  Kernel::Products(g, tile, at);
  const int64_t keys = at.hi - at.lo;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.first + i;
    float* scores = g.scores + i * g.block;
    if (g.args.mask) {
      ApplyMask(g.args, g.range.batch, g.rows.head(row), g.rows.query(row), j0 + at.lo,
                scores, keys);
    }
    ForbidColumns(g, row, j0 + at.lo, scores, keys);
    Kernel::template Row<true>(g, i, tile.rows, row, at);
  }
  Kernel::Accumulate(g, tile, 0, count, at);
}

// Keys [j0, j0 + count) as columns.
template <typename Kernel>
void PackKeyBlock(const Gradient& g, int64_t j0, int64_t count) {
  const AttentionArgs& args = g.args;
  const int64_t dim = args.head_dim, stride = args.kv_heads * dim;
  const int64_t at = KeyOffset(args, g.range, j0);
  const DType type = args.type;
  const void *k = At(type, args.k, at), *v = At(type, args.v, at);
  Kernel::PackTransposed(type, k, stride, dim, count, g.transposed[0]);
  Kernel::PackTransposed(type, v, stride, dim, count, g.transposed[1]);
  Kernel::PackStored(type, k, stride, count, dim, g.stored[0]);
}

template <typename Kernel>
void RunQueryGradient(const Gradient& g) {
  const AttentionArgs& args = g.args;
  ClearSums(g);
  const Interval keys = PrepareQueries<Kernel>(g);
  for (int64_t j = keys.lo / g.block * g.block; j < keys.hi; j += g.block) {
    const int64_t count = Min(g.block, keys.hi - j);
    PackKeyBlock<Kernel>(g, j, count);
    auto next = FetchOfKeys(args, g.range, j + g.block, g.block, keys.hi);
    const int64_t share = next.Share(g.rows.count());
    ForRowTiles(g.rows.count(), [&](RowTile tile) {
      next.Fetch(share);
      const Interval seen = SeenOf(g, tile, j, count);
      if (seen.lo < seen.hi) QueryTileGradient<Kernel>(g, tile, j, count, seen);
    });
  }
  for (int64_t row = 0; row < g.rows.count(); ++row) {
    StoreGradient(args.type, g.sums[0] + row * g.width, args.scale, nullptr,
                  At(args.type, g.all.dq, g.rows.offset(row)), args.head_dim);
  }
}

// ---- Keys -----------------------------------------------------------------------------

template <typename Kernel>
Interval PrepareKeys(const Gradient& g) {
  const AttentionArgs& args = g.args;
  const auto of = [&](const void* x, int64_t i) {
    return At(args.type, x, KeyOffset(args, g.range, g.range.row0 + i));
  };
  const auto k_of = [&](int64_t i) { return of(args.k, i); };
  const auto v_of = [&](int64_t i) { return of(args.v, i); };
  Kernel::PackLhs(g, k_of, args.scale * kLog2E, g.lhs[0]);
  Kernel::PackLhs(g, v_of, 1.0f, g.lhs[1]);
  Interval all{0, 0};
  for (int64_t row = 0; row < g.rows.count(); ++row) {
    g.seen[row] = QueriesOf(args, g.range.batch, g.range.row0 + row);
    all = Hull(all, g.seen[row]);
  }
  return all;
}

// What the loops know of queries [i0, i0 + count) of head h as columns. Whether one of them
// is blank: what it gives to the task's keys is added here.
bool SetColumns(const Gradient& g, int64_t h, int64_t i0, int64_t count) {
  const Interval keys{g.range.row0, g.range.row1};
  bool any = false;
  for (int64_t i = 0; i < RoundUp(count, kKeyUnit); ++i) {
    LoopQuery known{kInfinity, 0, false};
    if (i < count) {
      const Query query{g.args, g.range.batch, h, i0 + i};
      const float lse = SavedLse(query);
      known = LoopQueryOf(g.all, query, lse);
      if (known.is_blank) {
        AddFromBlank(g.all, query, lse, keys, g.width, g.sums[0], g.sums[1]);
      }
    }
    g.col_lse[i] = known.lse;
    g.col_delta[i] = known.delta;
    any = any || known.is_blank;
  }
  return any;
}

// Queries [i0, i0 + count) of head h as columns.
template <typename Kernel>
void PackQueryBlock(const Gradient& g, int64_t h, int64_t i0, int64_t count) {
  const AttentionArgs& args = g.args;
  const int64_t dim = args.head_dim, at = QueryOffset(args, g.range.batch, h, i0);
  const DType type = args.type;
  QueryRows x{type, At(type, args.q, at), At(type, g.all.dout, at), args.heads * dim};
  if (SetColumns(g, h, i0, count)) x = x.Cleaned(g, g.col_lse, count);
  Kernel::PackTransposed(type, x.q, x.stride, dim, count, g.transposed[0]);
  Kernel::PackTransposed(type, x.dout, x.stride, dim, count, g.transposed[1]);
  Kernel::PackStored(type, x.q, x.stride, count, dim, g.stored[0]);
  Kernel::PackStored(type, x.dout, x.stride, count, dim, g.stored[1]);
}

// Brings closer what PackQueryBlock reads of the block that begins with query i, if it is
// before the end.
RowFetch<3> FetchOfQueries(const Gradient& g, int64_t h, int64_t i, int64_t end) {
  if (i >= end) return {};
  const AttentionArgs& args = g.args;
  const int64_t at = QueryOffset(args, g.range.batch, h, i);
  const int64_t size = ElementSize(args.type);
  const auto of = [&](const void* x) { return (const char*)At(args.type, x, at); };
  return {{of(args.q), of(g.all.dout), of(args.out)},
          args.heads * args.head_dim * size, args.head_dim * size,
          Min(g.block, end - i)};
}

// Forbids the queries [i0, i0 + count) of head h to which the mask forbids key j.
void ApplyMaskToKey(const AttentionArgs& args, int64_t b, int64_t h, int64_t i0,
                    int64_t j, float* scores, int64_t count) {
  const int64_t* s = args.mask_strides;
  const uint8_t* mask = args.mask + b * s[0] + h * s[1] + i0 * s[2] + j * s[3];
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = mask[i * s[2]] ? scores[i] : kForbidden;
  }
}

template <typename Kernel>
void KeyTileGradient(const Gradient& g, RowTile tile, int64_t h, int64_t i0,
                     int64_t count, Interval at) {
  Kernel::Products(g, tile, at);
  const int64_t queries = at.hi - at.lo, first = i0 + at.lo;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.first + i;
    float* scores = g.scores + i * g.block;
    if (g.args.mask) {
      ApplyMaskToKey(g.args, g.range.batch, h, first, g.range.row0 + row, scores,
                     queries);
    }
    ForbidColumns(g, row, first, scores, queries);
    Kernel::template Row<false>(g, i, tile.rows, row, at);
  }
  for (int i = 0; i < 2; ++i) Kernel::Accumulate(g, tile, i, count, at);
}

// What every key's value gets from queries that see no key: they average all values.
const float* GradientOfMeans(const Gradient& g) {
  const AttentionArgs& args = g.args;
  const int64_t b = g.range.batch, dim = args.head_dim;
  int64_t queries = args.q_len;
  if (args.q_lengths) queries = Min(queries, args.q_lengths[b]);
  bool any = false;
  for (int64_t d = 0; d < g.width; ++d) g.extra[d] = 0;
  for (int64_t member = 0; member < args.group(); ++member) {
    const int64_t h = g.range.kv_head * args.group() + member;
    for (int64_t i = 0; i < queries; ++i) {
      if (!SawNone(SavedLse({args, b, h, i}))) continue;
      any = true;
      const int64_t at = QueryOffset(args, b, h, i);
      AddRow(args.type, At(args.type, g.all.dout, at), dim, g.extra);
    }
  }
  ScaleRow(g.extra, g.width, 1.0f / (float)args.kv_len);
  return any ? g.extra : nullptr;
}

template <typename Kernel>
void RunKeyGradient(const Gradient& g) {
  const AttentionArgs& args = g.args;
  ClearSums(g);
  const Interval queries = PrepareKeys<Kernel>(g);
  for (int64_t member = 0; member < args.group(); ++member) {
    const int64_t h = g.range.kv_head * args.group() + member;
    for (int64_t i = queries.lo / g.block * g.block; i < queries.hi; i += g.block) {
      const int64_t count = Min(g.block, queries.hi - i);
      PackQueryBlock<Kernel>(g, h, i, count);
      auto next = FetchOfQueries(g, h, i + g.block, queries.hi);
      const int64_t share = next.Share(g.rows.count());
      ForRowTiles(g.rows.count(), [&](RowTile tile) {
        next.Fetch(share);
        const Interval seen = SeenOf(g, tile, i, count);
        if (seen.lo < seen.hi) KeyTileGradient<Kernel>(g, tile, h, i, count, seen);
      });
    }
  }
  const float* extra = GradientOfMeans(g);
  for (int64_t row = 0; row < g.rows.count(); ++row) {
    const int64_t at = KeyOffset(args, g.range, g.range.row0 + row);
    const float *dk = g.sums[0] + row * g.width, *dv = g.sums[1] + row * g.width;
    StoreGradient(args.type, dk, args.scale, nullptr, At(args.type, g.all.dk, at),
                  args.head_dim);
    StoreGradient(args.type, dv, 1.0f, extra, At(args.type, g.all.dv, at), args.head_dim);
  }
}
