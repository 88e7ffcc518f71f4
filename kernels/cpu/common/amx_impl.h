// Products of bf16 matrices on AMX tiles: packing and the 32 x 32 product.
//
// Included by <op>/amx.cc inside an unnamed namespace, after common/vec_impl.h with 16
// lanes and under the same rules.
//
// A tile register has 16 rows of 64 bytes. One product needs eight of them: 2 x 2 of
// sums (32 x 32 f32), 2 of lhs and 2 of rhs, each for a step of 32 of the depth:
//
//   tiles 0-3: sums   00 01   tiles 4, 5: lhs, upper and lower 16 rows, 32 elements each
//                     10 11   tiles 6, 7: rhs, left and right 16 columns; row p has
//                                         elements (2p, j), (2p + 1, j) side by side
//
// Packed operands, all padded with zeros to whole steps and blocks:
//   rhs  per panel of 32 columns: per step of 32: [left 1 KB][right 1 KB]
//   lhs  per block of 32 rows:    per step of 32: [upper 1 KB][lower 1 KB]

#if defined(TRACEA_EMULATE_AMX)
#include "common/amx_emulation_impl.h"
#endif

constexpr int kAmxRows = 32;
constexpr int kAmxCols = 32;
constexpr int kAmxDepth = 32;                   // elements of bf16 in a step
constexpr int64_t kAmxTile = 1024;              // bytes of a tile register
constexpr int64_t kAmxStep = 2 * kAmxTile;      // bytes of a step of a packed operand
constexpr int64_t kAmxStepSize = kAmxStep / 2;  // the same in elements

// The operand of LDTILECFG: palette 1, eight tiles of 16 rows of 64 bytes.
struct alignas(64) AmxConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
constexpr AmxConfig kAmxConfig = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64},
                                  {16, 16, 16, 16, 16, 16, 16, 16}};
static_assert(sizeof(AmxConfig) == 64, "what the instruction reads");

// Tile registers are usable while one lives. To be made once per task, not longer: a
// thread of the pool runs other people's code next, which may need another configuration
// or pay for saving these registers.
struct AmxScope {
  AmxScope() { _tile_loadconfig(&kAmxConfig); }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// ---- Packing --------------------------------------------------------------------------

typedef uint16_t Half32 __attribute__((vector_size(64)));
typedef uint16_t Half32Any __attribute__((vector_size(64), aligned(2), may_alias));

// The first `count` elements; the other ones are zero and their memory is not touched.
TRACEA_INLINE Half32 LoadHalves(const BF16* p, int64_t count) {
  if (count >= 32) return *(const Half32Any*)p;
  if (count <= 0) return Half32{};
  return (Half32)_mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), p);
}

TRACEA_INLINE void StoreHalves(BF16* p, Half32 x) { *(Half32Any*)p = x; }

#define TRACEA_PAIRS(i) i, 32 + i, i + 1, 33 + i, i + 2, 34 + i, i + 3, 35 + i

// Elements 0 to 15 (low) or 16 to 31 (high) of a and b, in turns.
TRACEA_INLINE Half32 PairsLow(Half32 a, Half32 b) {
  const Half32 order = {TRACEA_PAIRS(0), TRACEA_PAIRS(4), TRACEA_PAIRS(8),
                        TRACEA_PAIRS(12)};
  return (Half32)_mm512_permutex2var_epi16((__m512i)a, (__m512i)order, (__m512i)b);
}
TRACEA_INLINE Half32 PairsHigh(Half32 a, Half32 b) {
  const Half32 order = {TRACEA_PAIRS(16), TRACEA_PAIRS(20), TRACEA_PAIRS(24),
                        TRACEA_PAIRS(28)};
  return (Half32)_mm512_permutex2var_epi16((__m512i)a, (__m512i)order, (__m512i)b);
}

// 16 rows of up to 32 elements into a tile of pairs, transposed: row p of the tile has
// elements (2p, 2p + 1) of each of the rows.
TRACEA_INLINE void TransposePairs(const BF16* from, int64_t stride, int64_t rows,
                                  int64_t depth, BF16* to) {
  Vec x[kLanes];
  if (rows >= kLanes && depth >= kAmxDepth) {
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = (Vec)*(const Half32Any*)(from + i * stride);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      x[i] = (Vec)LoadHalves(from + i * stride, i < rows ? depth : 0);
    }
  }
  Transpose(x);
  TRACEA_UNROLL
  for (int i = 0; i < kLanes; ++i) *(VecAny*)(to + 2 * kLanes * i) = x[i];
}

// One step: 32 rows and 32 columns.
TRACEA_INLINE void PackAmxRhsStep(const BF16* from, int64_t stride, BF16* to) {
  TRACEA_UNROLL
  for (int p = 0; p < kAmxDepth / 2; ++p) {
    const Half32 a = *(const Half32Any*)(from + 2 * p * stride);
    const Half32 b = *(const Half32Any*)(from + (2 * p + 1) * stride);
    StoreHalves(to + 2 * kLanes * p, PairsLow(a, b));
    StoreHalves(to + 2 * kLanes * p + kAmxTile / 2, PairsHigh(a, b));
  }
}

// The same for the rows and columns that there are.
TRACEA_INLINE void PackAmxRhsRest(const BF16* from, int64_t stride, int64_t rows,
                                  int64_t cols, BF16* to) {
  for (int64_t p = 0; p < kAmxDepth; p += 2) {
    const Half32 a = LoadHalves(from + p * stride, p < rows ? cols : 0);
    const Half32 b = LoadHalves(from + (p + 1) * stride, p + 1 < rows ? cols : 0);
    StoreHalves(to + kLanes * p, PairsLow(a, b));
    StoreHalves(to + kLanes * p + kAmxTile / 2, PairsHigh(a, b));
  }
}

// rhs (depth, cols), stored by rows of which the next is `stride` elements away.
inline void PackAmxRhs(const BF16* rhs, int64_t stride, int64_t depth, int64_t cols,
                       BF16* packed) {
  const int64_t panel = CeilDiv(depth, kAmxDepth) * kAmxStepSize;
  for (int64_t p = 0; p < depth; p += kAmxDepth) {
    const BF16* from = rhs + p * stride;
    BF16* to = packed + p / kAmxDepth * kAmxStepSize;
    for (int64_t j = 0; j < cols; j += kAmxCols, to += panel) {
      if (depth - p >= kAmxDepth && cols - j >= kAmxCols) {
        PackAmxRhsStep(from + j, stride, to);
      } else {
        PackAmxRhsRest(from + j, stride, depth - p, cols - j, to);
      }
    }
  }
}

// rhs (depth, cols), stored by columns: element (p, j) at rhs[j * stride + p].
inline void PackAmxRhsTransposed(const BF16* rhs, int64_t stride, int64_t depth,
                                 int64_t cols, BF16* packed) {
  for (int64_t j = 0; j < cols; j += kAmxCols) {
    for (int64_t p = 0; p < depth; p += kAmxDepth) {
      for (int64_t half = 0; half < kAmxCols; half += kLanes) {
        TransposePairs(rhs + (j + half) * stride + p, stride, cols - j - half, depth - p,
                       packed);
        packed += kAmxTile / 2;
      }
    }
  }
}

// Eight columns of 32 rows into eight rows of 32: blocks of 8 x 8, one in each quarter of
// the registers. (Masks of ones, as GCC 12 warns of undefined operands of those without.)
TRACEA_INLINE void TransposeEight(const BF16* from, int64_t stride, BF16* to) {
  constexpr int kCount = 8;
  __m512i x[kCount], pairs[kCount], fours[kCount];
  TRACEA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const BF16* row = from + i * stride;
    const auto quarter = [&](int q) __attribute__((always_inline)) {
      return _mm_loadu_si128((const __m128i*)(row + q * kCount * stride));
    };
    x[i] = _mm512_castsi128_si512(quarter(0));
    x[i] = _mm512_inserti32x4(x[i], quarter(1), 1);
    x[i] = _mm512_inserti32x4(x[i], quarter(2), 2);
    x[i] = _mm512_inserti32x4(x[i], quarter(3), 3);
  }
  TRACEA_UNROLL
  for (int i = 0; i < kCount; i += 2) {  // columns 0 to 3 and 4 to 7 of two rows
    pairs[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
  }
  TRACEA_UNROLL
  for (int i = 0; i < kCount; i += 4) {  // two columns of four rows
    TRACEA_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m512i a = pairs[i + j], b = pairs[i + j + 2];
      fours[i + 2 * j] = _mm512_maskz_unpacklo_epi32(0xffff, a, b);
      fours[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi32(0xffff, a, b);
    }
  }
  TRACEA_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    const __m512i even = _mm512_maskz_unpacklo_epi64(0xff, fours[i], fours[i + 4]);
    const __m512i odd = _mm512_maskz_unpackhi_epi64(0xff, fours[i], fours[i + 4]);
    StoreHalves(to + 2 * i * kAmxDepth, (Half32)even);
    StoreHalves(to + (2 * i + 1) * kAmxDepth, (Half32)odd);
  }
}

// lhs (rows, depth), stored by columns: element (i, p) at lhs[p * stride + i].
inline void PackAmxLhsTransposed(const BF16* lhs, int64_t stride, int64_t rows,
                                 int64_t depth, BF16* packed) {
  for (int64_t i = 0; i < rows; i += kAmxRows) {
    for (int64_t p = 0; p < depth; p += kAmxDepth, packed += kAmxStepSize) {
      const BF16* from = lhs + p * stride + i;
      int64_t from_stride = stride;
      alignas(64) BF16 whole[kAmxDepth * kAmxRows];
      if (rows - i < kAmxRows || depth - p < kAmxDepth) {
        for (int64_t q = 0; q < kAmxDepth; ++q) {
          const int64_t count = p + q < depth ? rows - i : 0;
          StoreHalves(whole + q * kAmxRows, LoadHalves(from + q * stride, count));
        }
        from = whole;
        from_stride = kAmxRows;
      }
      for (int64_t j = 0; j < kAmxRows; j += 8) {
        TransposeEight(from + j, from_stride, packed + j * kAmxDepth);
      }
    }
  }
}

// ---- The product ----------------------------------------------------------------------

// A block of 32 rows of lhs as the tiles are loaded from it. All in bytes.
struct AmxLhs {
  const void* data;
  int64_t stride;  // from row to row
  int64_t lower;   // from the upper 16 rows to the lower ones
  int64_t step;    // from one step to the next

  TRACEA_INLINE const char* At(int64_t i) const { return (const char*)data + i * step; }
};

TRACEA_INLINE AmxLhs PackedLhs(const BF16* packed) {
  return {packed, kAmxDepth * 2, kAmxTile, kAmxStep};
}

// 32 whole rows as they lie in memory, `stride` elements apart. Whole steps are read: the
// depth must be a multiple of 32, or memory beyond it readable and either it or the rest
// of rhs zero (and neither NaN nor infinite).
TRACEA_INLINE AmxLhs StoredLhs(const BF16* rows, int64_t stride) {
  return {rows, 2 * stride, 2 * stride * 16, kAmxDepth * 2};
}

// Compilers are not told that loading a tile reads memory: this makes them write first.
TRACEA_INLINE void BeforeTileLoads() { __asm__ volatile("" ::: "memory"); }

struct NoWork {
  TRACEA_INLINE void operator()(int64_t) const {}
};

// sums = lhs @ rhs, or sums += lhs @ rhs if `accumulate`, for a block of 32 rows of lhs
// and a panel of 32 columns of packed rhs. Rows of sums are `stride` f32 apart.
//
// rhs is loaded past L1 where the processor can, which leaves L1 to lhs: lhs is meant to
// be used again for the next panel, and to have up to 32 KB, a depth of 512.
//
// work(step) is called once in each step, between the tile products, which leave most of
// the core idle: the place for the epilogue of the block before.
//
// Loads come first. The order is of no matter to a thread that has the core to itself, but
// another thread on it makes loads and products wait for each other whenever they change.
//
// Without `lower` only the upper 16 rows are computed and stored; `right` alike.
// Lhs: AmxLhs, or another one with its members but `data` and `step`.
template <typename Lhs, typename Work>
TRACEA_INLINE void AmxProductOf(bool lower, bool right, int64_t steps, const Lhs& lhs,
                                const BF16* rhs, float* sums, int64_t stride,
                                bool accumulate, Work&& work) {
  float* const below = sums + 16 * stride;
  const int64_t row = stride * (int64_t)sizeof(float);
  BeforeTileLoads();
  if (accumulate) {
    _tile_loadd(0, sums, row);
    if (right) _tile_loadd(1, sums + 16, row);
    if (lower) _tile_loadd(2, below, row);
    if (lower && right) _tile_loadd(3, below + 16, row);
  } else {
    _tile_zero(0);
    if (right) _tile_zero(1);
    if (lower) _tile_zero(2);
    if (lower && right) _tile_zero(3);
  }
  const char* b = (const char*)rhs;
  for (int64_t step = 0; step < steps; ++step) {
    const char* a = lhs.At(step);
    _tile_loadd(4, a, lhs.stride);
    _tile_stream_loadd(6, b, 64);
    if (right) _tile_stream_loadd(7, b + kAmxTile, 64);
    if (lower) _tile_loadd(5, a + lhs.lower, lhs.stride);
    _tile_dpbf16ps(0, 4, 6);
    if (right) _tile_dpbf16ps(1, 4, 7);
    work(step);
    if (lower) {
      _tile_dpbf16ps(2, 5, 6);
      if (right) _tile_dpbf16ps(3, 5, 7);
    }
    b += kAmxStep;
  }
  _tile_stored(0, sums, row);
  if (right) _tile_stored(1, sums + 16, row);
  if (lower) _tile_stored(2, below, row);
  if (lower && right) _tile_stored(3, below + 16, row);
}

// The same of so many tiles of rows and columns.
template <int kRowTiles = 2, int kColTiles = 2, typename Lhs, typename Work = NoWork>
TRACEA_INLINE void AmxProduct(int64_t steps, const Lhs& lhs, const BF16* rhs,
                              float* sums, int64_t stride, bool accumulate,
                              Work&& work = Work()) {
  AmxProductOf(kRowTiles == 2, kColTiles == 2, steps, lhs, rhs, sums, stride, accumulate,
               work);
}

// The same of the tiles that some rows and columns are in: of all tiles, or of fewer, for
// which one copy of `work` does.
template <typename Lhs, typename Work>
TRACEA_INLINE void AmxBlockProduct(int64_t steps, int64_t rows, int64_t cols,
                                   const Lhs& lhs, const BF16* rhs, float* sums,
                                   bool accumulate, const Work& work) {
  const bool lower = rows > 16, right = cols > 16;
  if (lower && right) {
    AmxProductOf(true, true, steps, lhs, rhs, sums, kAmxCols, accumulate, work);
  } else {
    AmxProductOf(lower, right, steps, lhs, rhs, sums, kAmxCols, accumulate, work);
  }
}

// sums = lhs @ rhs for a block of 32 rows of packed lhs and `panels` of packed rhs, of a
// depth of two steps: the block stays in registers, for half of a panel at a time.
//
// work(half) is called once in each half.
template <typename Work>
TRACEA_INLINE void AmxShallowProducts(const BF16* lhs, const BF16* rhs, int64_t panels,
                                      float* sums, int64_t stride, Work&& work) {
  const char *a = (const char*)lhs, *b = (const char*)rhs;
  const int64_t row = stride * (int64_t)sizeof(float);
  BeforeTileLoads();
  _tile_loadd(4, a, 64);
  _tile_loadd(5, a + kAmxTile, 64);
  _tile_loadd(6, a + kAmxStep, 64);
  _tile_loadd(7, a + kAmxStep + kAmxTile, 64);
  for (int64_t half = 0; half < 2 * panels; ++half, sums += kAmxCols / 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_stream_loadd(2, b, 64);
    _tile_stream_loadd(3, b + kAmxStep, 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_dpbf16ps(1, 5, 2);
    work(half);
    _tile_dpbf16ps(0, 6, 3);
    _tile_dpbf16ps(1, 7, 3);
    _tile_stored(0, sums, row);
    _tile_stored(1, sums + 16 * stride, row);
    b += half % 2 == 0 ? kAmxTile : 2 * kAmxStep - kAmxTile;
  }
}
