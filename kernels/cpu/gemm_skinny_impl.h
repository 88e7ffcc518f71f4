// Few rows: rhs is streamed once and never packed. A part of gemm_impl.h.

constexpr int kSkinnyDepth = 1024;        // of lhs that is converted at a time
constexpr int kSkinnyStride = 1024 + 16;  // its rows are not in the same sets of L1
constexpr int kPair = 2 * kLanes;

// Most rows of rhs that are multiplied at once, so that sums are loaded and stored less
// often: as many as leave registers for everything else.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStreamDepth = 8;
#else
constexpr int kStreamDepth = 4;
#endif

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
  const int64_t count = kRows ? kRows : rows;
  TRACEA_UNROLL
  for (int64_t i = 0; i < count; ++i) {
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

// Halves are added to halves.
TRACEA_INLINE float SumLanes(Vec x) {
#if defined(__clang__)
  float lanes[kLanes];
  Store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#else
  TRACEA_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    Mask order;
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) order[i] = (i + width) % kLanes;
    x += __builtin_shuffle(x, order);
  }
  return x[0];
#endif
}

// The same for rhs stored by columns: dot products along k, kRows x kCols of them at once.
template <typename T, int kRows, int kCols>
void DotColumns(const float* lhs, const T* rhs, int64_t stride, int64_t kc, float* sums,
                int64_t sums_stride) {
  Vec acc[kRows][kCols] = {};
  for (int64_t p = 0; p < kc; p += kLanes) {
    Vec b[kCols];
    if (kc - p >= kLanes) {
      TRACEA_UNROLL
      for (int j = 0; j < kCols; ++j) b[j] = Load(rhs + j * stride + p);
    } else {
      for (int j = 0; j < kCols; ++j) b[j] = LoadPartial(rhs + j * stride + p, kc - p);
    }
    TRACEA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec a = Load(lhs + i * kSkinnyStride + p);
      TRACEA_UNROLL
      for (int j = 0; j < kCols; ++j) acc[i][j] += a * b[j];
    }
  }
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kCols; ++j) sums[i * sums_stride + j] += SumLanes(acc[i][j]);
  }
}

// kCols columns for all rows.
template <typename T, int kCols>
void DotRows(const float* lhs, const T* rhs, int64_t stride, int64_t rows, int64_t kc,
             float* sums, int64_t sums_stride) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    DotColumns<T, 4, kCols>(lhs + i * kSkinnyStride, rhs, stride, kc,
                            sums + i * sums_stride, sums_stride);
  }
  for (; i + 2 <= rows; i += 2) {
    DotColumns<T, 2, kCols>(lhs + i * kSkinnyStride, rhs, stride, kc,
                            sums + i * sums_stride, sums_stride);
  }
  for (; i < rows; ++i) {
    DotColumns<T, 1, kCols>(lhs + i * kSkinnyStride, rhs, stride, kc,
                            sums + i * sums_stride, sums_stride);
  }
}

// All rows of lhs, columns [p, p + kc), as f32 padded with zeros to whole vectors.
template <typename T>
void LoadSkinnyLhs(const GemmArgs& args, int64_t p, int64_t kc, float* to) {
  const T* lhs = (const T*)args.lhs;
  for (int64_t i = 0; i < args.m; ++i, to += kSkinnyStride) {
    if (!args.trans_lhs) {
      const T* row = lhs + i * args.lhs_stride + p;
      for (int64_t q = 0; q < kc; q += kLanes) Store(to + q, LoadUpTo(row + q, kc - q));
      continue;
    }
    for (int64_t q = 0; q < CeilDiv(kc, kLanes) * kLanes; ++q) {
      to[q] = q < kc ? LoadPartial(lhs + (p + q) * args.lhs_stride + i, 1)[0] : 0.0f;
    }
  }
}

template <typename T, int kRows>
void RunSkinny(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
               float* workspace) {
  const T* rhs = (const T*)args.rhs;
  const int64_t rows = args.m, width = blocks.strip, stride = blocks.sums_stride;
  float* sums = workspace;
  float* lhs = sums + rows * stride;
  const auto stream = blocks.stream_depth < kStreamDepth
                          ? StreamRows<T, kRows, kShallowDepth>
                          : StreamRows<T, kRows, kStreamDepth>;
  for (int64_t j0 = range.n0; j0 < range.n1; j0 += width) {
    const int64_t cols = Min(width, range.n1 - j0);
    memset(sums, 0, rows * stride * sizeof(float));
    for (int64_t p = 0; p < args.k; p += kSkinnyDepth) {
      const int64_t kc = Min(kSkinnyDepth, args.k - p);
      LoadSkinnyLhs<T>(args, p, kc, lhs);
      if (!args.trans_rhs) {
        const T* block = rhs + p * args.rhs_stride + j0;
        stream(lhs, block, args.rhs_stride, rows, kc, cols, sums, stride);
        continue;
      }
      const T* block = rhs + j0 * args.rhs_stride + p;
      int64_t j = 0;
      for (; j + 2 <= cols; j += 2) {
        const T* columns = block + j * args.rhs_stride;
        DotRows<T, 2>(lhs, columns, args.rhs_stride, rows, kc, sums + j, stride);
      }
      for (; j < cols; ++j) {
        const T* column = block + j * args.rhs_stride;
        DotRows<T, 1>(lhs, column, args.rhs_stride, rows, kc, sums + j, stride);
      }
    }
    const int64_t paired = args.trans_rhs ? 0 : cols / kPair * kPair;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < paired; c += kPair) RestorePair(rhs, sums + i * stride + c);
    }
    for (int64_t c = 0; c < cols; c += kTileN) {
      alignas(64) float bias_buffer[kTileN];
      const int64_t tile_cols = Min(kTileN, cols - c);
      const float* bias = LoadBias(args, j0 + c, tile_cols, bias_buffer);
      Finish(args, Tile{sums + c, stride, 0, j0 + c, rows, tile_cols}, bias);
    }
  }
}
