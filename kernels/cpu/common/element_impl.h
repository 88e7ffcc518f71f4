// Elements whose type is known at run time only. Included after common/vec_impl.h, under
// the same rules.

// `count` elements, at most a vector of them. The types are the same for a whole call,
// so the branches are predicted.
TRACEA_INLINE Vec LoadAs(DType type, const void* data, int64_t at, int64_t count) {
  switch (type) {
    case DType::kBF16:
      return LoadUpTo((const BF16*)data + at, count);
    case DType::kF16:
      return LoadUpTo((const F16*)data + at, count);
    default:
      return LoadUpTo((const F32*)data + at, count);
  }
}

TRACEA_INLINE void StoreAs(DType type, void* data, int64_t at, Vec x, int64_t count) {
  switch (type) {
    case DType::kBF16:
      return StoreUpTo((BF16*)data + at, x, count);
    case DType::kF16:
      return StoreUpTo((F16*)data + at, x, count);
    default:
      return StoreUpTo((F32*)data + at, x, count);
  }
}

// Brings elements into L1. Always inline, as compilers drop calls of functions that do
// nothing else.
TRACEA_INLINE void PrefetchElements(const void* data, DType type, int64_t at,
                                    int64_t count) {
  const int64_t size = type == DType::kF32 ? 4 : 2;
  PrefetchNear((const char*)data + at * size, count * size);
}

#if defined(__AVX512BF16__)
// Two vectors, the first `count` elements of them.
TRACEA_INLINE void StorePair(DType type, void* data, int64_t at, Vec low, Vec high,
                             int64_t count) {
  if (type == DType::kBF16) {
    const __m512i x = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    BF16* to = (BF16*)data + at;
    if (count >= 2 * kLanes) {
      _mm512_storeu_si512(to, x);
    } else {
      _mm512_mask_storeu_epi16(to, (__mmask32)((1u << count) - 1), x);
    }
    return;
  }
  StoreAs(type, data, at, low, count);
  if (count > kLanes) StoreAs(type, data, at + kLanes, high, count - kLanes);
}
#endif
