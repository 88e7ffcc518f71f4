// The register tile of vectors and its micro-kernels, on which every operation computes.
// Included by <op>/vectors_impl.h and tile/<isa>.cc inside an unnamed namespace, after
// common/micro_kernels.h and common/vec_impl.h.
//
// TRACEA_TILE, the table of the micro-kernels that are used, is defined by the including
// file, which compiles them if it uses AllMicroKernels().

#include "common/word_impl.h"

constexpr const auto& kMicroKernels = TRACEA_TILE;
constexpr int kTileM = decltype(TRACEA_TILE)::kTileRows;
constexpr int kTileVecs = decltype(TRACEA_TILE)::kTileVecs;
using TileKernels = MicroKernels<kTileM, kTileVecs>;
constexpr int kTileN = kTileVecs * kLanes;
constexpr int kDepthUnit = 8 * kWordDepth;
constexpr int kChunk = 16;  // words of a chunk of packed lhs: one cache line
constexpr int kChunkDepth = kChunk * kWordDepth;

// How lhs is packed: in chunks [words / kChunk][rows][kChunk], or in steps of the depth
// [words][kLhsStep].
enum LhsOrder { kByRow, kByColumn };
constexpr int kLhsStep = (kTileM + kLanes - 1) / kLanes * kLanes;

constexpr int kLineFloats = 16;
constexpr int kLineBytes = 64;
constexpr int64_t kRowsAhead = 4;  // that copied rows are asked for early, at least
constexpr int kDepthAhead = 16;  // steps that rhs is asked for early: it lies in L2

// Rows of an operand on their way from memory: they only come closer, or (if they are words
// already) are packed, `share` rows side by side and of each a unit in every chunk of a
// product: a burst of loads from memory would hold up those of the micro-kernel. A unit of
// packed lhs is a chunk, one of packed rhs is the row of a panel. kDeep rows as they are
// stored make one row of words.
template <int kUnit, int kDeep>
struct RowFeed {
  static constexpr int kUnitBytes = kUnit * (int)sizeof(float) / kDeep;  // of a stored row
  const char* from = nullptr;   // the next unit of the first row
  int64_t stride = 0;           // of stored rows, in bytes
  float* to = nullptr;          // where it goes, or null
  int64_t to_unit = 0;          // from one unit to the next, in words
  int64_t units = 0, left = 0;  // in a row; of these rows
  int64_t end = 0;              // its last byte in a unit, which may begin within a line
  int64_t rows = 0;             // that are left, with these
  int64_t most = 1, share = 0;  // rows side by side, now

  // Over so many chunks. A row may end within a product: more rows side by side, each from
  // far away, would come in bursts after all.
  TRACEA_INLINE void Spread(int64_t chunks) {
    const int64_t turns = chunks / Max(units, 1);
    most = turns > 0 ? CeilDiv(rows, turns) : rows;
  }

  TRACEA_INLINE Vec WordsAt(const char* row, int v) const {
    if constexpr (kDeep == 1) {
      return LoadBytes(row + v * sizeof(float));
    } else {
      return LoadAcross((const BF16*)row + v, stride / (int64_t)sizeof(BF16));
    }
  }

  TRACEA_INLINE void Step() {
    const char* row = from;
    float* line = to;
    for (int64_t s = 0; s < share; ++s, row += kDeep * stride, line += kUnit) {
      const char* early = row + (to ? Max(kRowsAhead, share) * kDeep * stride : 0);
      TRACEA_UNROLL
      for (int d = 0; d < kDeep; ++d, early += stride) {
        TRACEA_UNROLL
        for (int v = 0; v < kUnitBytes; v += kLineBytes) {
          __builtin_prefetch(early + v, 0, 2);
        }
        if (!to) __builtin_prefetch(early + end, 0, 2);
      }
      if (!to) continue;
      TRACEA_UNROLL
      for (int v = 0; v < kUnit; v += kLanes) Store(line + v, WordsAt(row, v));
    }
    from += kUnitBytes;
    to += to_unit;
    --left;
  }

  // Goes to the next rows, as these have passed.
  TRACEA_INLINE void Advance() {
    from += share * kDeep * stride - (share ? units * kUnitBytes : 0);
    if (to && share) to += share * kUnit - units * to_unit;
    rows -= share;
    share = Min(most, rows);
    left = share ? units : 0;
  }

  // Beside one chunk.
  TRACEA_INLINE void Continue() {
    if (rows == 0) return;
    if (left == 0) Advance();
    if (left > 0) Step();
  }

  TRACEA_INLINE bool untouched() const { return share == 0 && rows > 0; }

  // All that is left.
  TRACEA_INLINE void Drain() {
    while (rows > 0) Continue();
  }
};

// What a micro-kernel does beside its product.
struct Feeds {
  RowFeed<kChunk, 1> lhs;
  RowFeed<kTileN, kWordDepth> rhs;
};

// dst = src + lhs @ rhs for one register tile of kRows x kVecs vectors and a depth of
// `words`; a null src is zero. src joins at the end: rounding errors then grow with the
// depth of a block and the number of blocks, not with all of k. rhs is a panel
// [words][kTileN]. `own_feeds` is a Feeds, or null.
template <int kRows, int kVecs, LhsOrder kOrder>
void MicroKernel(int64_t words, const float* lhs, const float* rhs, const float* src,
                 int64_t src_stride, float* dst, int64_t dst_stride, void* own_feeds) {
  Feeds* const feeds = (Feeds*)own_feeds;
  Vec acc[kRows][kVecs];
  TRACEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TRACEA_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      acc[i][j] = Vec{};
    }
  }
  for (; words > 0; words -= kChunk) {
    const int64_t count = Min(words, kChunk);
    if (feeds) {
      feeds->lhs.Continue();
      feeds->rhs.Continue();
    }
    for (int64_t p = 0; p < count; ++p) {
      Vec b[kVecs];
      TRACEA_UNROLL
      for (int j = 0; j < kVecs; ++j) b[j] = Load(rhs + j * kLanes);
      TRACEA_UNROLL
      for (int j = 0; j < kVecs * kLanes; j += kLineFloats) {
        __builtin_prefetch(rhs + kDepthAhead * kTileN + j);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vec a = SplatWord(lhs[kOrder == kByRow ? i * kChunk + p : p * kLhsStep + i]);
        TRACEA_UNROLL
        for (int j = 0; j < kVecs; ++j) acc[i][j] = MultiplyAdd(acc[i][j], a, b[j]);
      }
      rhs += kTileN;
    }
    lhs += (kOrder == kByRow ? kRows : kLhsStep) * kChunk;
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

template <int kVecs = kTileVecs, int kRows = kTileM>
constexpr void FillMicroKernels(TileKernels* all) {
  all->table[kByRow][kVecs - 1][kRows - 1] = MicroKernel<kRows, kVecs, kByRow>;
  all->table[kByColumn][kVecs - 1][kRows - 1] = MicroKernel<kRows, kVecs, kByColumn>;
  if constexpr (kRows > 1) {
    FillMicroKernels<kVecs, kRows - 1>(all);
  } else if constexpr (kVecs > 1) {
    FillMicroKernels<kVecs - 1, kTileM>(all);
  }
}

constexpr TileKernels AllMicroKernels() {
  TileKernels all{};
  FillMicroKernels(&all);
  return all;
}

// For a tile of these sizes, or larger ones.
TRACEA_INLINE MicroKernelFn MicroKernelFor(LhsOrder order, int64_t rows, int64_t cols) {
  return kMicroKernels.table[order][Min(CeilDiv(cols, kLanes), kTileVecs) - 1][rows - 1];
}
