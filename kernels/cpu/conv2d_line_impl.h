// Windows that lie in the image and beside each other in a line are a matrix already: row
// i begins i * step pixels after the first. Their products read the image as it is.
// A part of conv2d_impl.h.

// Runs of contiguous depth: `length` words, `offset` after the first tap that is seen.
constexpr int kMostPieces = 64;
struct Pieces {
  int64_t count;
  int64_t offset[kMostPieces], length[kMostPieces];
};

// The pieces of depth [p, p + depth), whose taps y are from `first` on; false if they are
// too many.
bool CutDepth(const ConvProduct& product, int64_t p, int64_t depth, int64_t first,
              Pieces* pieces) {
  pieces->count = 0;
  if (depth == 0) return false;
  Runs runs = RunsFrom(product, p);
  const int64_t next_tap = product.x.tap_step * product.pixel;
  const int64_t next_line = product.y.tap_step * product.x.size * product.pixel;
  for (int64_t at = 0; at < depth; runs.o = 0) {
    if (pieces->count == kMostPieces) return false;
    const int64_t length = Min(runs.length - runs.o, depth - at);
    const int64_t offset =
        (runs.ty - first) * next_line + runs.tx * next_tap + runs.o;
    pieces->offset[pieces->count] = offset / kWordDepth;
    pieces->length[pieces->count++] = length / kWordDepth;
    at += length;
    if (++runs.tx < runs.per_line) continue;
    runs.tx = 0;
    ++runs.ty;
  }
  return true;
}

// As MicroKernel, for lhs rows that lie `lhs_stride` words apart. Every third row has a
// pointer of its own: scaled indices reach the two after it.
template <int kRows, int kVecs>
void LineKernel(const Pieces& pieces, const float* lhs, int64_t lhs_stride,
                const float* rhs, const float* src, int64_t src_stride, float* dst,
                int64_t dst_stride) {
  constexpr int kPointers = (kRows + 2) / 3;
  Vec acc[kRows][kVecs];
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      acc[i][j] = Vec{};
    }
  }
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    const float* at[kPointers];
    TRACEA_UNROLL
    for (int i = 0; i < kPointers; ++i) {
      at[i] = lhs + pieces.offset[piece] + 3 * i * lhs_stride;
    }
    for (int64_t p = pieces.length[piece]; p > 0; --p) {
      Vec b[kVecs];
      TRACEA_UNROLL
      for (int j = 0; j < kVecs; ++j) b[j] = Load(rhs + j * kLanes);
      TRACEA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vec a = SplatWord(at[i / 3][i % 3 * lhs_stride]);
        TRACEA_UNROLL
        for (int j = 0; j < kVecs; ++j) acc[i][j] = MultiplyAdd(acc[i][j], a, b[j]);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kPointers; ++i) ++at[i];
      rhs += kTileN;
    }
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

using LineKernelFn = void (*)(const Pieces&, const float*, int64_t, const float*,
                              const float*, int64_t, float*, int64_t);

// table[vecs - 1][rows - 1]
struct LineKernels {
  LineKernelFn table[kTileVecs][kTileM];
  template <int kRows>
  constexpr void Fill() {
    table[0][kRows - 1] = LineKernel<kRows, 1>;
    table[1][kRows - 1] = LineKernel<kRows, 2>;
    if constexpr (kRows > 1) Fill<kRows - 1>();
  }
  constexpr LineKernels() : table() { Fill<kTileM>(); }
};
constexpr LineKernels kLineKernels;

// Whether the image can be read as it is, in whole words, and that pays: lines must fill
// most of a register tile, and rows of lhs must not lie multiples of a page apart, where
// all of them need the same few lines of L1.
template <typename T>
bool ReadsWell(const ConvProduct& product) {
  if (!kAreWords<T> || product.channels % kWordDepth != 0) return false;
  const Interval inside = InteriorOf(product.x);
  const int64_t count = inside.end - inside.begin;
  const int64_t bytes = product.x.step * product.pixel * (int64_t)sizeof(T);
  return bytes % 4096 != 0 && 10 * count >= 7 * kTileM * CeilDiv(count, kTileM);
}
