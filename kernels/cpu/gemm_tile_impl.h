// The register tile and its micro-kernels. A part of gemm_impl.h.

constexpr int kTileM = TRACEA_TILE_M;
constexpr int kTileVecs = 2;
constexpr int kTileN = kTileVecs * kLanes;
constexpr int kDepthUnit = 8;
constexpr int kChunk = 16;  // depth of a chunk of packed lhs: one cache line of f32
constexpr int kLineFloats = 16;
constexpr int kDepthAhead = 16;  // steps that rhs is asked for early: it lies in L2

// dst = src + lhs @ rhs for one register tile of kRows x kVecs vectors; a null src is
// zero. lhs and rhs are packed as above. src joins at the end: rounding errors then grow
// with the depth of a block and the number of blocks, not with all of k.
template <int kRows, int kVecs>
void MicroKernel(int64_t kc, const float* lhs, const float* rhs, const float* src,
                 int64_t src_stride, float* dst, int64_t dst_stride) {
  Vec acc[kRows][kVecs];
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      acc[i][j] = Vec{};
    }
  }
  for (; kc > 0; kc -= kChunk) {
    const int64_t depth = Min(kc, kChunk);
    for (int64_t p = 0; p < depth; ++p) {
      Vec b[kVecs];
      TRACEA_UNROLL
      for (int j = 0; j < kVecs; ++j) b[j] = Load(rhs + j * kLanes);
      TRACEA_UNROLL
      for (int j = 0; j < kVecs * kLanes; j += kLineFloats) {
        __builtin_prefetch(rhs + kDepthAhead * kTileN + j);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vec a = Splat(lhs[i * kChunk + p]);
        TRACEA_UNROLL
        for (int j = 0; j < kVecs; ++j) acc[i][j] += a * b[j];
      }
      rhs += kTileN;
    }
    lhs += kRows * kChunk;
  }
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      Vec sum = acc[i][j];
      if (src) sum += Load(src + i * src_stride + j * kLanes);
      Store(dst + i * dst_stride + j * kLanes, sum);
    }
  }
}

using MicroKernelFn = void (*)(int64_t, const float*, const float*, const float*, int64_t,
                               float*, int64_t);

// table[vecs - 1][rows - 1]
struct MicroKernels {
  MicroKernelFn table[kTileVecs][kTileM];
  template <int kRows>
  constexpr void Fill() {
    table[0][kRows - 1] = MicroKernel<kRows, 1>;
    table[1][kRows - 1] = MicroKernel<kRows, 2>;
    if constexpr (kRows > 1) Fill<kRows - 1>();
  }
  constexpr MicroKernels() : table() { Fill<kTileM>(); }
};
constexpr MicroKernels kMicroKernels;
