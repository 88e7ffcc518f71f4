// Vectors of f32 for the instruction set this translation unit is compiled for.
//
// Included once by each <op>/<isa>.cc inside an unnamed namespace, and by nothing else:
// everything here must have internal linkage, because an inline function compiled for
// AVX-512 must never be the copy that the linker keeps for all. For the same reason
// nothing here uses function templates of the standard library.
//
// TRACEA_LANES, the number of f32 in one vector, is defined by the including file.

constexpr int kLanes = TRACEA_LANES;

#define TRACEA_INLINE inline __attribute__((always_inline))
// TRACEA_UNROLL is for loops of a known count, TRACEA_UNROLL_8 for those of any other.
#if defined(__clang__)
#define TRACEA_UNROLL _Pragma("unroll")
#define TRACEA_UNROLL_8 _Pragma("unroll 8")
#else
#define TRACEA_UNROLL _Pragma("GCC unroll 32")
#define TRACEA_UNROLL_8 _Pragma("GCC unroll 8")
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecAny __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef int32_t Mask __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
typedef uint16_t HalfAny __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

// Storage types: what an element is in memory.
struct F32 {
  float bits;
};
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

TRACEA_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
TRACEA_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
TRACEA_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

TRACEA_INLINE Vec Splat(float x) { return x - Vec{}; }
TRACEA_INLINE Bits AsBits(Vec x) { return (Bits)x; }
TRACEA_INLINE Vec AsVec(Bits x) { return (Vec)x; }
TRACEA_INLINE Vec Select(Mask where, Vec yes, Vec no) {
  return where ? yes : no;
}

// ---- 16-bit formats -------------------------------------------------------------------

TRACEA_INLINE Vec FromBF16(Half h) {
  return AsVec(__builtin_convertvector(h, Bits) << 16);
}

// Round to nearest, ties to even; a NaN stays a NaN (its quiet bit is set, so that
// dropping the low half cannot turn it into infinity).
#if defined(__AVX512BF16__)
TRACEA_INLINE Half ToBF16(Vec x) { return (Half)_mm512_cvtneps_pbh((__m512)x); }
#else
TRACEA_INLINE Half ToBF16(Vec x) {
  const Bits u = AsBits(x);
  const Bits rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const Bits nan = (u >> 16) | 0x40;
  const Bits is_nan = (Bits)(x != x);
  return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), Half);
}
#endif

#if defined(__AVX512F__)
// Zero-masked forms: the plain ones start from an undefined register, which GCC 12 takes
// for a use of an uninitialised variable.
TRACEA_INLINE Vec FromF16(Half h) {
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
}
TRACEA_INLINE Half ToF16(Vec x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  return (Half)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, kNearest);
}
#elif defined(__F16C__)
TRACEA_INLINE Vec FromF16(Half h) { return (Vec)_mm256_cvtph_ps((__m128i)h); }
TRACEA_INLINE Half ToF16(Vec x) {
  return (Half)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
//   f16: s eeeee mmmmmmmmmm        exponent bias 15
//   f32: s eeeeeeee mmmmmmmmmm...  exponent bias 127; mantissas differ by 13 bits
TRACEA_INLINE Vec FromF16(Half h) {
  const Bits u = __builtin_convertvector(h, Bits);
  const Bits sign = (u & 0x8000) << 16;
  const Bits magnitude = (u & 0x7fff) << 13;
  const Bits exponent = magnitude & 0x0f800000;
  const Bits normal = magnitude + ((127 - 15) << 23);
  const Bits special = magnitude + ((255 - 31) << 23);
  // Subnormal: give it the smallest normal exponent's implicit bit, then subtract it.
  const Bits smallest = Bits{} + (113u << 23);
  const Bits subnormal = AsBits(AsVec(magnitude + smallest) - AsVec(smallest));
  const Bits is_special = (Bits)(exponent == 0x0f800000);
  const Bits is_subnormal = (Bits)(exponent == 0);
  return AsVec(sign | (is_special & special) | (is_subnormal & subnormal) |
               (~is_special & ~is_subnormal & normal));
}
TRACEA_INLINE Half ToF16(Vec x) {
  const Bits u = AsBits(x) & 0x7fffffff;
  const Bits sign = (AsBits(x) >> 16) & 0x8000;
  const Bits normal = (u - ((127 - 15) << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
  // Below 2^-14 adding 0.5 lets the addition round at the last subnormal bit, 2^-24.
  const Bits half = AsBits(Splat(0.5f));
  const Bits subnormal = AsBits(AsVec(u) + AsVec(half)) - half;
  const Bits is_subnormal = (Bits)((Mask)u < (113 << 23));
  const Bits is_overflow = (Bits)((Mask)u >= (143 << 23));
  const Bits is_nan = (Bits)((Mask)u > 0x7f800000);
  const Bits finite = (is_subnormal & subnormal) | (~is_subnormal & normal);
  const Bits special = 0x7c00 | (is_nan & (((u >> 13) & 0x3ff) | 0x200));
  return __builtin_convertvector(
      sign | (is_overflow & special) | (~is_overflow & finite), Half);
}
#endif

// ---- Loads and stores -----------------------------------------------------------------

TRACEA_INLINE Vec Load(const F32* p) { return *(const VecAny*)p; }
TRACEA_INLINE Vec Load(const BF16* p) { return FromBF16(*(const HalfAny*)p); }
TRACEA_INLINE Vec Load(const F16* p) { return FromF16(*(const HalfAny*)p); }
TRACEA_INLINE Vec Load(const float* p) { return *(const VecAny*)p; }

TRACEA_INLINE void Store(F32* p, Vec x) { *(VecAny*)p = x; }
TRACEA_INLINE void Store(BF16* p, Vec x) { *(HalfAny*)p = ToBF16(x); }
TRACEA_INLINE void Store(F16* p, Vec x) { *(HalfAny*)p = ToF16(x); }
TRACEA_INLINE void Store(float* p, Vec x) { *(VecAny*)p = x; }

// The first `count` < kLanes elements; the other lanes are zero and their memory is not
// touched.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
TRACEA_INLINE Vec LoadPartial(const F32* p, int64_t count) {
  return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
TRACEA_INLINE Vec LoadPartial(const BF16* p, int64_t count) {
  return FromBF16((Half)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p));
}
TRACEA_INLINE Vec LoadPartial(const F16* p, int64_t count) {
  return FromF16((Half)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p));
}
TRACEA_INLINE void StorePartial(F32* p, Vec x, int64_t count) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)x);
}
TRACEA_INLINE void StorePartial(BF16* p, Vec x, int64_t count) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1), (__m256i)ToBF16(x));
}
TRACEA_INLINE void StorePartial(F16* p, Vec x, int64_t count) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1), (__m256i)ToF16(x));
}
#else
#if defined(__AVX2__)
// A vector that was just stored lane by lane would have to wait for its stores.
TRACEA_INLINE Vec LoadPartial(const F32* p, int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lanes);
  return (Vec)_mm256_maskload_ps((const float*)p, below);
}
#endif
template <typename T>
TRACEA_INLINE Vec LoadPartial(const T* p, int64_t count) {
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return Load(lanes);
}
template <typename T>
TRACEA_INLINE void StorePartial(T* p, Vec x, int64_t count) {
  T lanes[kLanes];
  Store(lanes, x);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}
#endif

template <typename T>
TRACEA_INLINE Vec LoadUpTo(const T* p, int64_t count) {
  return count >= kLanes ? Load(p) : LoadPartial(p, count);
}
template <typename T>
TRACEA_INLINE void StoreUpTo(T* p, Vec x, int64_t count) {
  if (count >= kLanes) {
    Store(p, x);
  } else if (count > 0) {
    StorePartial(p, x, count);
  }
}

// Towards L2.
TRACEA_INLINE void PrefetchBytes(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch((const char*)data + at, 0, 2);
  }
}

// Into L1.
TRACEA_INLINE void PrefetchNear(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch((const char*)data + at, 0, 3);
  }
}

// ---- Transposition --------------------------------------------------------------------

#if TRACEA_LANES == 4
#define TRACEA_LOW_HALVES 0, 4, 1, 5
#define TRACEA_HIGH_HALVES 2, 6, 3, 7
#elif TRACEA_LANES == 8
#define TRACEA_LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define TRACEA_HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#elif TRACEA_LANES == 16
#define TRACEA_LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TRACEA_HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

#if defined(__clang__)
TRACEA_INLINE Vec InterleaveLow(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, TRACEA_LOW_HALVES);
}
TRACEA_INLINE Vec InterleaveHigh(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, TRACEA_HIGH_HALVES);
}
#else
TRACEA_INLINE Vec InterleaveLow(Vec a, Vec b) {
  return __builtin_shuffle(a, b, Mask{TRACEA_LOW_HALVES});
}
TRACEA_INLINE Vec InterleaveHigh(Vec a, Vec b) {
  return __builtin_shuffle(a, b, Mask{TRACEA_HIGH_HALVES});
}
#endif

// x[i] lane j <-> x[j] lane i. Interleaving row i with row i + kLanes/2 rotates the bits
// of (row, lane) by one; after log2(kLanes) rounds the two have changed places.
TRACEA_INLINE void Transpose(Vec (&x)[kLanes]) {
  TRACEA_UNROLL
  for (int round = 1; round < kLanes; round *= 2) {
    Vec y[kLanes];
    TRACEA_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      y[2 * i] = InterleaveLow(x[i], x[i + kLanes / 2]);
      y[2 * i + 1] = InterleaveHigh(x[i], x[i + kLanes / 2]);
    }
    TRACEA_UNROLL
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// ---- Folding --------------------------------------------------------------------------

struct Largest {
  template <typename V>
  static TRACEA_INLINE V Of(V a, V b) {
    return a > b ? a : b;
  }
};
struct Plus {
  template <typename V>
  static TRACEA_INLINE V Of(V a, V b) {
    return a + b;
  }
};

// Lane i is all lanes of x[i] folded into one, by halves: Transpose, joining what it parts.
template <typename Op>
TRACEA_INLINE Vec FoldEach(Vec (&x)[kLanes]) {
  TRACEA_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    TRACEA_UNROLL
    for (int i = 0; i < width; ++i) {
      x[i] = Op::Of(InterleaveLow(x[i], x[i + width]), InterleaveHigh(x[i], x[i + width]));
    }
  }
  return x[0];
}
