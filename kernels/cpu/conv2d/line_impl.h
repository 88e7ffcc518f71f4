// Windows that see the same taps need no zeros for the others: their products pass over
// these. Beside each other in a line such windows are a matrix already, row i of which
// begins i * step pixels after the first, and are read from the image as they are. Others
// are copied. A part of conv2d/vectors_impl.h.

// Runs of contiguous depth that some windows see, in words: `offset` after the first tap
// that is seen, its weights in row `depth` of the block's.
constexpr int kMostPieces = 64;
struct Pieces {
  int64_t count, longest;
  int64_t depth[kMostPieces], offset[kMostPieces], length[kMostPieces];
};

// Adds the part of a block's depth that is in [begin, end), which is `offset` elements
// after the first tap; false if there is no room.
TRACEA_INLINE bool AddPiece(const Block& block, int64_t begin, int64_t end,
                            int64_t offset, Pieces* pieces) {
  const int64_t from = Max(begin, block.p0), to = Min(end, block.p0 + block.kc);
  if (from >= to) return true;
  if (pieces->count == kMostPieces) return false;
  const int64_t i = pieces->count++;
  pieces->depth[i] = (from - block.p0) / kWordDepth;
  pieces->offset[i] = (offset + from - begin) / kWordDepth;
  pieces->length[i] = (to - from) / kWordDepth;
  pieces->longest = Max(pieces->longest, pieces->length[i]);
  return true;
}

// The pieces of a block's depth that are of these taps; false if they are too many.
bool CutDepth(const ConvProduct& product, const Block& block, const Region& taps,
              Pieces* pieces) {
  const int64_t channels = product.channels;
  const int64_t next_tap = product.x.tap_step * product.pixel;
  const int64_t next_line = product.y.tap_step * product.x.size * product.pixel;
  const int64_t together = product.merges_taps() ? taps.x.end - taps.x.begin : 1;
  pieces->count = pieces->longest = 0;
  for (int64_t ty = taps.y.begin; ty < taps.y.end; ++ty) {
    for (int64_t tx = taps.x.begin; tx < taps.x.end; tx += together) {
      const int64_t begin = (ty * product.x.taps + tx) * channels;
      const int64_t offset =
          (ty - taps.y.begin) * next_line + (tx - taps.x.begin) * next_tap;
      if (!AddPiece(block, begin, begin + together * channels, offset, pieces)) {
        return false;
      }
    }
  }
  return true;
}

// The first element of the first of these taps that a window sees.
template <typename T>
TRACEA_INLINE const T* FirstSeen(const ConvProduct& product, const Windows& windows,
                                 int64_t i, const Region& taps) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t line = windows.y[i] + taps.y.begin * y.tap_step;
  const int64_t column = windows.x[i] + taps.x.begin * x.tap_step;
  const int64_t pixel = windows.image[i] + line * x.size + column;
  return (const T*)product.image + pixel * product.pixel;
}

// Copies the pieces of some windows, each window's one after the other, to `lines`.
template <typename T>
void CopyPieces(const ConvProduct& product, const Windows& windows, int64_t rows,
                const Region& taps, const Pieces& pieces, const Lines<T>& lines) {
  if (pieces.count == 0) return;
  const T* end = EndOfImage<T>(product);
  for (int64_t i = 0; i < rows; ++i) {
    const LineSink<T> sink{lines.data + i * lines.stride, end};
    const T* from = FirstSeen<T>(product, windows, i, taps);
    int64_t at = 0;
    for (int64_t piece = 0; piece < pieces.count; ++piece) {
      const int64_t count = pieces.length[piece] * kWordDepth;
      sink.Copy(at, from + pieces.offset[piece] * kWordDepth, count);
      at += count;
    }
  }
}

// The same pieces of what was copied.
Pieces Copied(const Pieces& pieces) {
  Pieces copied = pieces;
  int64_t at = 0;
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    copied.offset[piece] = at;
    at += pieces.length[piece];
  }
  return copied;
}

// What comes into L1 while a row block is multiplied: bytes from each piece's first word
// on, so many for each word.
struct Ahead {
  int64_t from, step;
};

// As MicroKernel, for lhs rows that lie `lhs_stride` words apart. Every third row has a
// pointer of its own: scaled indices reach the two after it.
template <int kRows, int kVecs>
void LineKernel(const Pieces& pieces, const float* lhs, int64_t lhs_stride,
                const Ahead& ahead, const float* rhs, const float* src,
                int64_t src_stride, float* dst, int64_t dst_stride) {
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
    const float* row = rhs + pieces.depth[piece] * kTileN;
    const char* next = (const char*)at[0] + ahead.from;
    for (int64_t p = pieces.length[piece]; p > 0; --p) {
      __builtin_prefetch(next, 0, 3);
      next += ahead.step;
      Vec b[kVecs];
      TRACEA_UNROLL
      for (int j = 0; j < kVecs; ++j) b[j] = Load(row + j * kLanes);
      TRACEA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vec a = SplatWord(at[i / 3][i % 3 * lhs_stride]);
        TRACEA_UNROLL
        for (int j = 0; j < kVecs; ++j) acc[i][j] = MultiplyAdd(acc[i][j], a, b[j]);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kPointers; ++i) ++at[i];
      row += kTileN;
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

using LineKernelFn = void (*)(const Pieces&, const float*, int64_t, const Ahead&,
                              const float*, const float*, int64_t, float*, int64_t);

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

// Whether windows of `count` neighbours in a line are better read as they are: they must
// fill most of a register tile, and not lie multiples of a page apart, where all of them
// need the same few lines of L1.
template <typename T>
bool ReadsWell(const ConvProduct& product, int64_t count) {
  const int64_t bytes = product.x.step * product.pixel * (int64_t)sizeof(T);
  return bytes % 4096 != 0 && 10 * count >= 7 * kTileM * CeilDiv(count, kTileM);
}
