// Rows of operands whose type is known at run time only: what the rest does with elements.
// Loops over these rows exist once for each type, everything around them once. A part of
// attention/common_impl.h.

// Calls body(T()) for elements T of the type.
template <typename Body>
TRACEA_INLINE auto OfType([[maybe_unused]] DType type, const Body& body) {
#if defined(TRACEA_ONLY_BF16)
  return body(BF16());
#else
  switch (type) {
    case DType::kBF16:
      return body(BF16());
    case DType::kF16:
      return body(F16());
    default:
      return body(F32());
  }
#endif
}

TRACEA_INLINE int64_t ElementSize(DType type) {
  return OfType(type, [](auto t) { return (int64_t)sizeof(t); });
}

// Element `i`.
TRACEA_INLINE const void* At(DType type, const void* data, int64_t i) {
  return (const char*)data + i * ElementSize(type);
}
TRACEA_INLINE void* At(DType type, void* data, int64_t i) {
  return (char*)data + i * ElementSize(type);
}

float Dot(DType type, const void* a, const void* b, int64_t size) {
  return OfType(type, [&](auto t) {
    using T = decltype(t);
    Vec sum{};
    for (int64_t i = 0; i < size; i += kLanes) {
      sum += LoadUpTo((const T*)a + i, size - i) * LoadUpTo((const T*)b + i, size - i);
    }
    return Fold<Plus>(sum);
  });
}

// sum += row, of `size` elements.
void AddRow(DType type, const void* row, int64_t size, float* sum) {
  OfType(type, [&](auto t) {
    for (int64_t d = 0; d < size; d += kLanes) {
      Store(sum + d, Load(sum + d) + LoadUpTo((const decltype(t)*)row + d, size - d));
    }
  });
}

// sum += factor * row
void AddScaled(DType type, float factor, const void* row, int64_t size, float* sum) {
  OfType(type, [&](auto t) {
    for (int64_t d = 0; d < size; d += kLanes) {
      const Vec x = LoadUpTo((const decltype(t)*)row + d, size - d);
      Store(sum + d, Load(sum + d) + x * factor);
    }
  });
}

// to = from * scale
void StoreScaled(DType type, const float* from, float scale, void* to, int64_t size) {
  OfType(type, [&](auto t) {
    for (int64_t d = 0; d < size; d += kLanes) {
      StoreUpTo((decltype(t)*)to + d, Load(from + d) * scale, size - d);
    }
  });
}
