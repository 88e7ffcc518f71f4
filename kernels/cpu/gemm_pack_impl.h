// Packing: conversion to f32 and the layouts the micro-kernels read. A part of
// gemm_impl.h.

TRACEA_INLINE void PrefetchBytes(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch((const char*)data + at, 0, 2);
  }
}

// rows x kc of lhs, stored by rows.
template <typename T>
void PackLhs(const T* lhs, int64_t stride, int64_t rows, int64_t kc, float* packed) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = lhs + i * stride;
    float* to = packed + i * kChunk;
    int64_t p = 0;
    for (; p + kChunk <= kc; p += kChunk) {
      TRACEA_UNROLL
      for (int v = 0; v < kChunk; v += kLanes) Store(to + v, Load(row + p + v));
      to += rows * kChunk;
    }
    for (int v = 0; p < kc; p += kLanes, v += kLanes) {
      Store(to + v, LoadUpTo(row + p, kc - p));
    }
  }
}

// kLanes x kLanes elements, transposed; `rows` and `cols` of them exist.
template <typename T>
TRACEA_INLINE void LoadTransposed(const T* from, int64_t stride, int64_t rows,
                                  int64_t cols, Vec (&x)[kLanes]) {
  if (rows >= kLanes && cols >= kLanes) {
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = Load(from + i * stride);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      x[i] = i < rows ? LoadUpTo(from + i * stride, cols) : Vec{};
    }
  }
  Transpose(x);
}

// The same for lhs stored by columns: element (i, p) at lhs[p * stride + i]. Columns up
// to `readable` exist, so that most loads need no mask.
template <typename T>
void PackLhsTransposed(const T* lhs, int64_t stride, int64_t rows, int64_t readable,
                       int64_t kc, float* packed) {
  for (int64_t p = 0; p < kc; p += kLanes) {
    float* to = packed + (p / kChunk) * rows * kChunk + p % kChunk;
    for (int64_t i = 0; i < rows; i += kLanes) {
      Vec x[kLanes];
      LoadTransposed(lhs + p * stride + i, stride, kc - p, readable - i, x);
      const int64_t count = Min(kLanes, rows - i);
      for (int64_t r = 0; r < count; ++r) Store(to + (i + r) * kChunk, x[r]);
    }
  }
}

// kc x cols of rhs, stored by rows, into panels. Rows are far apart, so the hardware does
// not foresee the next one.
template <typename T>
void PackRhs(const T* rhs, int64_t stride, int64_t kc, int64_t cols, float* packed) {
  for (int64_t p = 0; p < kc; ++p) {
    const T* row = rhs + p * stride;
    const T* ahead = row + (p + kRowsAhead < kc ? kRowsAhead * stride : 0);
    float* to = packed + p * kTileN;
    int64_t j = 0;
    for (; j + kTileN <= cols; j += kTileN) {
      PrefetchBytes(ahead + j, kTileN * sizeof(T));
      Store(to, Load(row + j));
      Store(to + kLanes, Load(row + j + kLanes));
      to += kc * kTileN;
    }
    if (j < cols) {
      Store(to, LoadUpTo(row + j, cols - j));
      Store(to + kLanes,
            j + kLanes < cols ? LoadUpTo(row + j + kLanes, cols - j - kLanes) : Vec{});
    }
  }
}

// The same for rhs stored by columns: element (p, j) at rhs[j * stride + p].
template <typename T>
void PackRhsTransposed(const T* rhs, int64_t stride, int64_t kc, int64_t cols,
                       float* packed) {
  for (int64_t j = 0; j < cols; j += kLanes) {
    float* to = packed + (j / kTileN) * kc * kTileN + j % kTileN;
    for (int64_t p = 0; p < kc; p += kLanes) {
      Vec x[kLanes];
      LoadTransposed(rhs + j * stride + p, stride, cols - j, kc - p, x);
      const int64_t count = Min(kLanes, kc - p);
      for (int64_t r = 0; r < count; ++r) Store(to + (p + r) * kTileN, x[r]);
    }
  }
  if ((cols - 1) % kTileN < kLanes) {  // the last panel's second vector was not reached
    float* to = packed + (cols - 1) / kTileN * kc * kTileN + kLanes;
    for (int64_t p = 0; p < kc; ++p) Store(to + p * kTileN, Vec{});
  }
}
