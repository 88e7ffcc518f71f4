// Few rows: rhs is streamed once and never packed. A part of gemm_impl.h.

constexpr int kSkinnyRows = 4;     // most rows
constexpr int kSkinnyCols = 1024;  // columns whose accumulators stay in L1
constexpr int kSkinnyDepth = 1024;

// sums[rows][kSkinnyCols] += lhs[rows][kSkinnyDepth] @ rhs, rhs stored by rows. Several
// rows of rhs at once, so that each accumulator is loaded and stored less often.
template <typename T, int kRows>
void StreamRows(const float* lhs, const T* rhs, int64_t stride, int64_t kc, int64_t cols,
                float* sums) {
  constexpr int kDepth = kRows == 1 ? 8 : 4;
  int64_t p = 0;
  for (; p + kDepth <= kc; p += kDepth) {
    const T* row = rhs + p * stride;
    for (int64_t j = 0; j < cols; j += kLanes) {
      Vec b[kDepth];
      if (cols - j >= kLanes) {
        TRACEA_UNROLL
        for (int d = 0; d < kDepth; ++d) b[d] = Load(row + d * stride + j);
      } else {
        for (int d = 0; d < kDepth; ++d) b[d] = LoadPartial(row + d * stride + j, cols - j);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Vec sum = Load(sums + i * kSkinnyCols + j);
        TRACEA_UNROLL
        for (int d = 0; d < kDepth; ++d) {
          sum += Splat(lhs[i * kSkinnyDepth + p + d]) * b[d];
        }
        Store(sums + i * kSkinnyCols + j, sum);
      }
    }
  }
  for (; p < kc; ++p) {
    for (int64_t j = 0; j < cols; j += kLanes) {
      const Vec b = LoadUpTo(rhs + p * stride + j, cols - j);
      for (int i = 0; i < kRows; ++i) {
        float* to = sums + i * kSkinnyCols + j;
        Store(to, Load(to) + Splat(lhs[i * kSkinnyDepth + p]) * b);
      }
    }
  }
}

TRACEA_INLINE float SumLanes(Vec x) {
  float lanes[kLanes];
  Store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The same for rhs stored by columns: dot products along k, kCols of them at once.
template <typename T, int kRows, int kCols>
void DotColumns(const float* lhs, const T* rhs, int64_t stride, int64_t kc, float* sums) {
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
      const Vec a = Load(lhs + i * kSkinnyDepth + p);
      TRACEA_UNROLL
      for (int j = 0; j < kCols; ++j) acc[i][j] += a * b[j];
    }
  }
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kCols; ++j) sums[i * kSkinnyCols + j] += SumLanes(acc[i][j]);
  }
}

// All rows of lhs, columns [p, p + kc), as f32 padded with zeros to whole vectors.
template <typename T>
void LoadSkinnyLhs(const GemmArgs& args, int64_t p, int64_t kc, float* to) {
  const T* lhs = (const T*)args.lhs;
  for (int64_t i = 0; i < args.m; ++i, to += kSkinnyDepth) {
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
void RunSkinny(const GemmArgs& args, const GemmRange& range, float* workspace) {
  constexpr int kDots = kRows <= 2 ? 4 : 2;
  const T* rhs = (const T*)args.rhs;
  float* sums = workspace;
  float* lhs = sums + kSkinnyRows * kSkinnyCols;
  for (int64_t j0 = range.n0; j0 < range.n1; j0 += kSkinnyCols) {
    const int64_t cols = Min(kSkinnyCols, range.n1 - j0);
    memset(sums, 0, kRows * kSkinnyCols * sizeof(float));
    for (int64_t p = 0; p < args.k; p += kSkinnyDepth) {
      const int64_t kc = Min(kSkinnyDepth, args.k - p);
      LoadSkinnyLhs<T>(args, p, kc, lhs);
      if (!args.trans_rhs) {
        const T* block = rhs + p * args.rhs_stride + j0;
        StreamRows<T, kRows>(lhs, block, args.rhs_stride, kc, cols, sums);
        continue;
      }
      const T* block = rhs + j0 * args.rhs_stride + p;
      int64_t j = 0;
      for (; j + kDots <= cols; j += kDots) {
        const T* column = block + j * args.rhs_stride;
        DotColumns<T, kRows, kDots>(lhs, column, args.rhs_stride, kc, sums + j);
      }
      for (; j < cols; ++j) {
        const T* column = block + j * args.rhs_stride;
        DotColumns<T, kRows, 1>(lhs, column, args.rhs_stride, kc, sums + j);
      }
    }
    for (int64_t c = 0; c < cols; c += kTileN) {
      alignas(64) float bias_buffer[kTileN];
      const int64_t tile_cols = Min(kTileN, cols - c);
      const float* bias = LoadBias(args, j0 + c, tile_cols, bias_buffer);
      const Tile tile{sums + c, kSkinnyCols, 0, j0 + c, kRows, tile_cols};
      Finish(args, tile, bias);
    }
  }
}
