// Packing: conversion to words and the layouts the micro-kernels read. Included after
// common/tile_impl.h.

constexpr int kVecDepth = kLanes * kWordDepth;  // of a vector of words along the depth

// rows x kc of lhs, stored by rows.
template <typename T>
void PackLhs(const T* lhs, int64_t stride, int64_t rows, int64_t kc, float* packed) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = lhs + i * stride;
    float* to = packed + i * kChunk;
    int64_t p = 0;
    for (; p + kChunkDepth <= kc; p += kChunkDepth) {
      TRACEA_UNROLL
      for (int v = 0; v < kChunk; v += kLanes) {
        Store(to + v, LoadWords(row + p + v * kWordDepth));
      }
      to += rows * kChunk;
    }
    for (int v = 0; p < kc; p += kVecDepth, v += kLanes) {
      Store(to + v, LoadWordsUpTo(row + p, kc - p));
    }
  }
}

// kLanes words of the depth of kLanes rows, transposed; `rows` and elements of the depth
// of them exist.
template <typename T>
TRACEA_INLINE void LoadTransposed(const T* from, int64_t stride, int64_t rows,
                                  int64_t depth, Vec (&x)[kLanes]) {
  if (rows >= kLanes && depth >= kVecDepth) {
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = LoadWords(from + i * stride);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      x[i] = i < rows ? LoadWordsUpTo(from + i * stride, depth) : Vec{};
    }
  }
  Transpose(x);
}

// The same from rows of the depth, of which `depth` and `cols` columns exist.
template <typename T>
TRACEA_INLINE void LoadAcrossTransposed(const T* from, int64_t stride, int64_t depth,
                                        int64_t cols, Vec (&x)[kLanes]) {
  const int64_t step = stride * kWordDepth;
  if (depth >= kVecDepth && cols >= kLanes) {
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = LoadAcross(from + i * step, stride);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      x[i] = LoadAcrossUpTo(from + i * step, stride, depth - i * kWordDepth, cols);
    }
  }
  Transpose(x);
}

// kc x cols, stored by rows, into panels [words][kWidth]. Rows are far apart, so the
// hardware does not foresee the next one.
template <int kWidth, typename T>
void PackPanels(const T* from, int64_t stride, int64_t kc, int64_t cols, float* packed) {
  const int64_t words = WordsIn(kc);
  for (int64_t p = 0; p < words; ++p) {
    const int64_t left = kc - p * kWordDepth;
    const T* row = from + p * kWordDepth * stride;
    const T* ahead = row + (left >= kRowsAhead + kWordDepth ? kRowsAhead * stride : 0);
    float* to = packed + p * kWidth;
    int64_t j = 0;
    for (; left >= kWordDepth && j + kWidth <= cols; j += kWidth) {
      TRACEA_UNROLL
      for (int d = 0; d < kWordDepth; ++d) {
        PrefetchBytes(ahead + d * stride + j, kWidth * sizeof(T));
      }
      TRACEA_UNROLL
      for (int v = 0; v < kWidth; v += kLanes) {
        Store(to + v, LoadAcross(row + j + v, stride));
      }
      to += words * kWidth;
    }
    for (; j < cols; j += kWidth, to += words * kWidth) {
      TRACEA_UNROLL
      for (int v = 0; v < kWidth; v += kLanes) {
        Store(to + v, LoadAcrossUpTo(row + j + v, stride, left, cols - j - v));
      }
    }
  }
}

// Up to kTileM rows of lhs, stored by columns: element (i, p) at lhs[p * stride + i], and
// packed so. `readable` rows exist, so that most loads need no mask.
template <typename T>
void PackLhsColumns(const T* lhs, int64_t stride, int64_t readable, int64_t kc,
                    float* packed) {
  PackPanels<kLhsStep>(lhs, stride, kc, Min(kLhsStep, readable), packed);
}

// kc x cols of rhs, stored by rows.
template <typename T>
void PackRhs(const T* rhs, int64_t stride, int64_t kc, int64_t cols, float* packed) {
  PackPanels<kTileN>(rhs, stride, kc, cols, packed);
}

// The same for rhs stored by columns: element (p, j) at rhs[j * stride + p].
template <typename T>
void PackRhsTransposed(const T* rhs, int64_t stride, int64_t kc, int64_t cols,
                       float* packed) {
  const int64_t words = WordsIn(kc);
  for (int64_t j = 0; j < cols; j += kLanes) {
    float* to = packed + (j / kTileN) * words * kTileN + j % kTileN;
    for (int64_t p = 0; p < words; p += kLanes) {
      Vec x[kLanes];
      const int64_t at = p * kWordDepth;
      LoadTransposed(rhs + j * stride + at, stride, cols - j, kc - at, x);
      const int64_t count = Min(kLanes, words - p);
      for (int64_t r = 0; r < count; ++r) Store(to + (p + r) * kTileN, x[r]);
    }
  }
  // Vectors of the last panel that were not reached.
  for (int64_t j = CeilDiv(cols, kLanes) * kLanes; j % kTileN != 0; j += kLanes) {
    float* to = packed + j / kTileN * words * kTileN + j % kTileN;
    for (int64_t p = 0; p < words; ++p) Store(to + p * kTileN, Vec{});
  }
}
