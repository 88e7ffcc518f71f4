// Elements whose type is known at run time only. Included after vec_impl.h, under the
// same rules.

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
