// Words: what a lane of a packed operand holds. A part of common/tile_impl.h.
//
//   as a rule                  an element of the depth, as f32
//   with TRACEA_WORDS_OF_BF16  two elements of the depth, (p, p + 1), as bf16; a last one
//                              alone has a zero beside it
//
// Both take 32 bits, so blocks, tiles and transpositions know nothing but words. Those of
// two elements lie in memory as they are packed if the operand is stored along the depth.

#if defined(TRACEA_WORDS_OF_BF16)
constexpr int kWordDepth = 2;
#else
constexpr int kWordDepth = 1;
#endif

TRACEA_INLINE int64_t WordsIn(int64_t depth) { return CeilDiv(depth, kWordDepth); }

// Whether elements stored along the depth are words as they lie there.
template <typename T>
constexpr bool kAreWords = sizeof(T) * kWordDepth == sizeof(float);

typedef float VecOfBytes __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

TRACEA_INLINE Vec LoadBytes(const void* p) { return *(const VecOfBytes*)p; }

#if defined(TRACEA_WORDS_OF_BF16)

// Not by arithmetic: as f32, an infinity beside another element is a signalling NaN.
TRACEA_INLINE Vec SplatWord(float word) { return (Vec)_mm512_set1_ps(word); }

// VDPBF16PS: products and sums to nearest, subnormals count as zero.
TRACEA_INLINE Vec MultiplyAdd(Vec sum, Vec a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Words of the depth, which is stored along; `depth` elements of it are left.
TRACEA_INLINE Vec LoadWords(const BF16* p) { return LoadBytes(p); }
TRACEA_INLINE Vec LoadWordsUpTo(const BF16* p, int64_t depth) {
  if (depth >= 2 * kLanes) return LoadBytes(p);
  return (Vec)_mm512_maskz_loadu_epi16((__mmask32)((1u << depth) - 1), p);
}

TRACEA_INLINE Vec JoinHalves(Half first, Half second) {
  return AsVec(__builtin_convertvector(first, Bits) |
               __builtin_convertvector(second, Bits) << 16);
}
TRACEA_INLINE Half LoadHalfUpTo(const BF16* p, int64_t count) {
  if (count >= kLanes) return *(const HalfAny*)p;
  return (Half)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p);
}

// An element of the depth for each lane, not yet beside the other ones of its word.
using Part = Half;
TRACEA_INLINE Part LoadPart(const BF16* p, int64_t count) { return LoadHalfUpTo(p, count); }
TRACEA_INLINE Vec JoinParts(const Part (&parts)[kWordDepth]) {
  return JoinHalves(parts[0], parts[1]);
}

// A word of each of kLanes rows or columns, whose elements lie side by side; `stride` is
// that of the depth. With limits: `depth` elements of it and `count` columns are left.
TRACEA_INLINE Vec LoadAcross(const BF16* p, int64_t stride) {
  return JoinHalves(*(const HalfAny*)p, *(const HalfAny*)(p + stride));
}
TRACEA_INLINE Vec LoadAcrossUpTo(const BF16* p, int64_t stride, int64_t depth,
                                 int64_t count) {
  if (depth <= 0 || count <= 0) return Vec{};
  return JoinHalves(LoadHalfUpTo(p, count),
                    depth > 1 ? LoadHalfUpTo(p + stride, count) : Half{});
}

#else

TRACEA_INLINE Vec SplatWord(float word) { return Splat(word); }
TRACEA_INLINE Vec MultiplyAdd(Vec sum, Vec a, Vec b) { return sum + a * b; }

template <typename T>
TRACEA_INLINE Vec LoadWords(const T* p) {
  return Load(p);
}
template <typename T>
TRACEA_INLINE Vec LoadWordsUpTo(const T* p, int64_t depth) {
  return LoadUpTo(p, depth);
}
using Part = Vec;
template <typename T>
TRACEA_INLINE Part LoadPart(const T* p, int64_t count) {
  return LoadUpTo(p, count);
}
TRACEA_INLINE Vec JoinParts(const Part (&parts)[kWordDepth]) { return parts[0]; }
template <typename T>
TRACEA_INLINE Vec LoadAcross(const T* p, int64_t) {
  return Load(p);
}
template <typename T>
TRACEA_INLINE Vec LoadAcrossUpTo(const T* p, int64_t, int64_t depth, int64_t count) {
  return depth > 0 && count > 0 ? LoadUpTo(p, count) : Vec{};
}

#endif
