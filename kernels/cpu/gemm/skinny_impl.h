// Few rows: rhs is streamed once and never packed. A part of gemm/vectors_impl.h.
//
// Few columns are the few rows of the transposed product, out^T = rhs^T lhs^T, which
// streams lhs. Only the epilogue, which works on rows of the output, turns the sums around.

constexpr int kSkinnyDepth = 1024;  // of few rows that is converted at a time,
constexpr int kLongDepth = 4096;    // at most if rhs is read along it,
constexpr int kNearRows = 8192;     // and elements of them then, which L1 or nearly L1 holds
constexpr int kSkinnyGap = 16;      // so that its rows are not in the same sets of L1
constexpr int kSkinnyStride = kSkinnyDepth + kSkinnyGap;
constexpr int kPair = 2 * kLanes;

// Most rows of rhs that are multiplied at once, so that sums are loaded and stored less
// often, and columns whose dot products are: as many as leave registers for everything
// else.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStreamDepth = 8;
constexpr int kDotCols = 4;
#else
constexpr int kStreamDepth = 4;
constexpr int kDotCols = 2;
#endif

// A product of few rows. Both operands may be stored by rows or by columns.
template <typename T>
struct FewRows {
  const T *lhs, *rhs;
  int64_t lhs_stride, rhs_stride;
  bool trans_lhs, trans_rhs;
  int64_t rows, k;
};

// The product, or the transposed one if its columns are few.
template <typename T>
FewRows<T> FewRowsOf(const GemmArgs& args, const GemmBlocks& blocks) {
  const T *lhs = (const T*)args.lhs, *rhs = (const T*)args.rhs;
  if (blocks.skinny == Skinny::kRows) {
    return {lhs, rhs, args.lhs_stride, args.rhs_stride, args.trans_lhs, args.trans_rhs,
            args.m, args.k};
  }
  return {rhs, lhs, args.rhs_stride, args.lhs_stride, !args.trans_rhs, !args.trans_lhs,
          args.n, args.k};
}

// Two vectors of kPair elements. Those of bf16 are the even and the odd ones: a bf16 is
// the upper half of an f32, so a shift or a mask converts half of what was loaded.
template <typename T>
TRACEA_INLINE void LoadPair(const T* p, Vec& a, Vec& b) {
  a = Load(p);
  b = Load(p + kLanes);
}
typedef uint32_t BitsAny __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
TRACEA_INLINE void LoadPair(const BF16* p, Vec& a, Vec& b) {
  const Bits x = *(const BitsAny*)p;
  a = AsVec(x << 16);
  b = AsVec(x & 0xffff0000);
}

// Puts the sums of one pair, made from LoadPair's vectors, in the order of columns.
template <typename T>
TRACEA_INLINE void RestorePair(const T*, float*) {}
TRACEA_INLINE void RestorePair(const BF16*, float* sums) {
  const Vec a = Load(sums), b = Load(sums + kLanes);
  Store(sums, InterleaveLow(a, b));
  Store(sums + kLanes, InterleaveHigh(a, b));
}

// sums[rows][stride] += lhs[rows][kDepth] @ rhs[kDepth], the columns [j, j + kPair) of it.
// kRows = 0: `rows` is not known beforehand.
template <typename T, int kRows, int kDepth>
TRACEA_INLINE void StreamPair(const float* lhs, const T* rhs, int64_t rhs_stride,
                              int64_t ahead, int64_t rows, float* sums,
                              int64_t sums_stride) {
  Vec b[kDepth][2];
  TRACEA_UNROLL
  for (int d = 0; d < kDepth; ++d) {
    PrefetchBytes(rhs + d * rhs_stride + ahead, kPair * (int64_t)sizeof(T));
    LoadPair(rhs + d * rhs_stride, b[d][0], b[d][1]);
  }
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    float* to = sums + i * sums_stride;
    Vec low = Load(to), high = Load(to + kLanes);
    TRACEA_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      const Vec a = Splat(lhs[i * kSkinnyStride + d]);
      low += a * b[d][0];
      high += a * b[d][1];
    }
    Store(to, low);
    Store(to + kLanes, high);
  };
  if constexpr (kRows > 0) {
    TRACEA_UNROLL
    for (int64_t i = 0; i < kRows; ++i) add(i);
  } else {
    TRACEA_UNROLL_8
    for (int64_t i = 0; i < rows; ++i) add(i);
  }
}

// sums[rows][sums_stride] += lhs[rows][kc] @ rhs[kc][cols], rhs stored by rows. The sums of
// whole pairs of vectors are in LoadPair's order.
template <typename T, int kRows, int kDepth>
void StreamRows(const float* lhs, const T* rhs, int64_t stride, int64_t rows, int64_t kc,
                int64_t cols, float* sums, int64_t sums_stride) {
  const int64_t paired = cols / kPair * kPair;
  int64_t p = 0;
  for (; p + kDepth <= kc; p += kDepth) {
    const T* row = rhs + p * stride;
    const int64_t ahead = p + 2 * kDepth <= kc ? kDepth * stride : 0;
    for (int64_t j = 0; j < paired; j += kPair) {
      StreamPair<T, kRows, kDepth>(lhs + p, row + j, stride, ahead, rows, sums + j,
                                   sums_stride);
    }
  }
  for (; p < kc; ++p) {
    for (int64_t j = 0; j < paired; j += kPair) {
      StreamPair<T, kRows, 1>(lhs + p, rhs + p * stride + j, stride, 0, rows, sums + j,
                              sums_stride);
    }
  }
  for (int64_t j = paired; j < cols; j += kLanes) {
    for (p = 0; p < kc; ++p) {
      const Vec b = LoadUpTo(rhs + p * stride + j, cols - j);
      for (int64_t i = 0; i < rows; ++i) {
        float* to = sums + i * sums_stride + j;
        Store(to, Load(to) + Splat(lhs[i * kSkinnyStride + p]) * b);
      }
    }
  }
}

// sums[i] is the sum of acc[i]; whole vectors of them are written.
template <int kCount>
TRACEA_INLINE void SumAll(Vec (&acc)[kCount], float* sums) {
  TRACEA_UNROLL
  for (int i = 0; i < kCount; i += kLanes) {
    Vec x[kLanes];
    TRACEA_UNROLL
    for (int j = 0; j < kLanes; ++j) x[j] = i + j < kCount ? acc[i + j] : Vec{};
    Store(sums + i, FoldEach<Plus>(x));
  }
}

// The same for rhs stored by columns: dot products along k, kRows x kCols of them at once.
// `coming` columns from `next`, if they exist, come closer.
template <typename T, int kRows, int kCols>
void DotColumns(const float* lhs, int64_t lhs_stride, const T* rhs, int64_t stride,
                const T* next, int64_t coming, int64_t kc, float* sums,
                int64_t sums_stride) {
  Vec acc[kRows * kCols] = {};
  for (int64_t p = 0; p < kc; p += kLanes) {
    Vec b[kCols];
    if (kc - p >= kLanes) {
      for (int64_t j = 0; j < coming; ++j) __builtin_prefetch(next + j * stride + p, 0, 2);
      TRACEA_UNROLL
      for (int j = 0; j < kCols; ++j) b[j] = Load(rhs + j * stride + p);
    } else {
      for (int j = 0; j < kCols; ++j) b[j] = LoadPartial(rhs + j * stride + p, kc - p);
    }
    TRACEA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec a = Load(lhs + i * lhs_stride + p);
      TRACEA_UNROLL
      for (int j = 0; j < kCols; ++j) acc[i * kCols + j] += a * b[j];
    }
  }
  float block[(kRows * kCols + kLanes - 1) / kLanes * kLanes];
  SumAll(acc, block);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCols; ++j) sums[i * sums_stride + j] += block[i * kCols + j];
  }
}

template <typename T, int kCols>
constexpr decltype(&DotColumns<T, 1, kCols>) kDotColumns[] = {
    DotColumns<T, 1, kCols>, DotColumns<T, 2, kCols>, DotColumns<T, 3, kCols>,
    DotColumns<T, 4, kCols>};
constexpr int64_t kDotRows = 4;

// Columns [0, kCols) for all rows, in blocks as equal as possible. The columns after the
// next ones come closer meanwhile, a share beside each block: memory takes as long as the
// products.
template <typename T, int kCols>
void DotRows(const float* lhs, int64_t lhs_stride, const T* rhs, int64_t stride,
             int64_t rows, int64_t kc, float* sums, int64_t sums_stride) {
  int64_t left = kCols;  // of the columns to come
  const T* next = rhs + 2 * kCols * stride;
  for (int64_t blocks = CeilDiv(rows, kDotRows); blocks > 0; --blocks) {
    const int64_t count = CeilDiv(rows, blocks), coming = CeilDiv(left, blocks);
    kDotColumns<T, kCols>[count - 1](lhs, lhs_stride, rhs, stride, next, coming, kc, sums,
                                     sums_stride);
    rows -= count;
    lhs += count * lhs_stride;
    sums += count * sums_stride;
    left -= coming;
    next += coming * stride;
  }
}

// sums[rows][sums_stride] += lhs[rows][kc] @ rhs[kc][cols], rhs stored by columns.
template <typename T>
void Dot(const float* lhs, int64_t lhs_stride, const T* rhs, int64_t stride, int64_t rows,
         int64_t kc, int64_t cols, float* sums, int64_t sums_stride) {
  int64_t j = 0;
  for (; j + kDotCols <= cols; j += kDotCols) {
    DotRows<T, kDotCols>(lhs, lhs_stride, rhs + j * stride, stride, rows, kc, sums + j,
                         sums_stride);
  }
  for (; j < cols; ++j) {
    DotRows<T, 1>(lhs, lhs_stride, rhs + j * stride, stride, rows, kc, sums + j,
                  sums_stride);
  }
}

// All rows, columns [p, p + kc) of them, as f32 padded with zeros to whole vectors.
template <typename T>
void LoadFewRows(const FewRows<T>& product, int64_t p, int64_t kc, float* to,
                 int64_t to_stride) {
  const int64_t stride = product.lhs_stride;
  if (!product.trans_lhs) {
    for (int64_t i = 0; i < product.rows; ++i, to += to_stride) {
      const T* row = product.lhs + i * stride + p;
      for (int64_t q = 0; q < kc; q += kLanes) Store(to + q, LoadUpTo(row + q, kc - q));
    }
    return;
  }
  for (int64_t i = 0; i < product.rows; i += kLanes, to += kLanes * to_stride) {
    const int64_t rows = Min(kLanes, product.rows - i);
    for (int64_t q = 0; q < kc; q += kLanes) {
      const T* from = product.lhs + (p + q) * stride + i;
      Vec x[kLanes];
      LoadAcrossTransposed(from, stride, kc - q, rows, x);
      for (int64_t r = 0; r < rows; ++r) Store(to + r * to_stride + q, x[r]);
    }
  }
}

// Columns are read the faster the longer their pieces are, but rows in several blocks are
// read again for each few of them. Halves of f32 are long already.
template <typename T>
int64_t DepthOf(const FewRows<T>& product) {
  if (!product.trans_rhs) return kSkinnyDepth;
  const int64_t least = sizeof(T) == 4 ? kSkinnyDepth / 2 : kSkinnyDepth;
  int64_t depth = kLongDepth;
  while (depth > least && depth * product.rows > kNearRows) depth /= 2;
  return depth;
}

struct SkinnyBuffers {
  float* sums;        // of a strip
  float* lhs;         // a block of the few rows, `lhs_stride` apart
  int64_t depth;      // of that block
  int64_t lhs_stride;

  template <typename T>
  SkinnyBuffers(const FewRows<T>& product, const GemmBlocks& blocks, Workspace& space)
      : depth(DepthOf(product)), lhs_stride(depth + kSkinnyGap) {
    sums = space.Take<float>(product.rows * blocks.sums_stride);
    lhs = space.Take<float>(product.rows * lhs_stride);
  }
};

// Sums of columns [j, j + cols).
template <typename T, int kRows>
void SumStrip(const FewRows<T>& product, const GemmBlocks& blocks, int64_t j, int64_t cols,
              const SkinnyBuffers& buffers) {
  float *sums = buffers.sums, *lhs = buffers.lhs;
  const int64_t depth = buffers.depth, lhs_stride = buffers.lhs_stride;
  const int64_t rows = product.rows, stride = product.rhs_stride;
  const auto stream = blocks.stream_depth < kStreamDepth
                          ? StreamRows<T, kRows, kShallowDepth>
                          : StreamRows<T, kRows, kStreamDepth>;
  memset(sums, 0, rows * blocks.sums_stride * sizeof(float));
  for (int64_t p = 0; p < product.k; p += depth) {
    const int64_t kc = Min(depth, product.k - p);
    LoadFewRows(product, p, kc, lhs, lhs_stride);
    if (product.trans_rhs) {
      const T* block = product.rhs + j * stride + p;
      Dot(lhs, lhs_stride, block, stride, rows, kc, cols, sums, blocks.sums_stride);
    } else {
      const T* block = product.rhs + p * stride + j;
      stream(lhs, block, stride, rows, kc, cols, sums, blocks.sums_stride);
    }
  }
  if (product.trans_rhs) return;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = sums + i * blocks.sums_stride;
    for (int64_t c = 0; c + kPair <= cols; c += kPair) RestorePair(product.rhs, row + c);
  }
}

// The epilogue of columns [j, j + cols) of few rows.
void FinishStrip(const GemmArgs& args, int64_t j, int64_t cols, float* sums,
                 int64_t stride) {
  for (int64_t c = 0; c < cols; c += kTileN) {
    alignas(64) float bias_buffer[kTileN];
    const int64_t tile_cols = Min(kTileN, cols - c);
    const float* bias = LoadBias(args, j + c, tile_cols, bias_buffer);
    Finish(args, Tile{sums + c, stride, 0, j + c, args.m, tile_cols}, bias);
  }
}

// The epilogue of rows [i, i + rows) of few columns, whose sums are stored by columns.
void FinishTurnedStrip(const GemmArgs& args, int64_t i, int64_t rows, const float* sums,
                       int64_t stride) {
  alignas(64) float buffer[kLanes * kTileN], bias_buffer[kTileN];
  for (int64_t j = 0; j < args.n; j += kTileN) {
    const int64_t cols = Min(kTileN, args.n - j);
    const float* bias = LoadBias(args, j, cols, bias_buffer);
    for (int64_t r = 0; r < rows; r += kLanes) {
      for (int64_t c = 0; c < cols; c += kLanes) {
        Vec x[kLanes];
        const F32* from = (const F32*)sums + (j + c) * stride + r;
        LoadTransposed(from, stride, cols - c, kLanes, x);
        for (int64_t q = 0; q < kLanes; ++q) Store(buffer + q * kTileN + c, x[q]);
      }
      Finish(args, Tile{buffer, kTileN, i + r, j, Min(kLanes, rows - r), cols}, bias);
    }
  }
}

template <typename T, int kRows>
void RunSkinny(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
               float* workspace) {
  const bool turned = blocks.skinny == Skinny::kColumns;
  const FewRows<T> product = FewRowsOf<T>(args, blocks);
  const int64_t begin = turned ? range.m0 : range.n0, end = turned ? range.m1 : range.n1;
  Workspace space(workspace);
  const SkinnyBuffers buffers(product, blocks, space);
  for (int64_t j = begin; j < end; j += blocks.strip) {
    const int64_t cols = Min(blocks.strip, end - j);
    SumStrip<T, kRows>(product, blocks, j, cols, buffers);
    if (turned) {
      FinishTurnedStrip(args, j, cols, buffers.sums, blocks.sums_stride);
    } else {
      FinishStrip(args, j, cols, buffers.sums, blocks.sums_stride);
    }
  }
}
