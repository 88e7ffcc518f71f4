// The loop over elements, for the instruction set this translation unit is compiled for:
// one template for all functions, types and scalars, which the compiler vectorises.
//
// Included once by each elementwise/<isa>.cc inside an unnamed namespace; see vec_impl.h.

#define TRACEA_INLINE inline __attribute__((always_inline))

template <typename T>
struct Complex {
  T re, im;
};

TRACEA_INLINE float magnitude(float x) { return __builtin_fabsf(x); }
TRACEA_INLINE double magnitude(double x) { return __builtin_fabs(x); }
TRACEA_INLINE float root(float x) { return __builtin_sqrtf(x); }
TRACEA_INLINE double root(double x) { return __builtin_sqrt(x); }

#include "elementwise/table_impl.h"

template <typename T>
struct PartOf {
  using Type = T;
};
template <typename T>
struct PartOf<Complex<T>> {
  using Type = T;
};

template <typename F, typename T, ScalarSide kScalar>
void RunElementwise(const void* x_data, const void* y_data, void* out_data, int64_t begin,
                    int64_t end) {
  using R = decltype(F::Of(T{}, T{}));
  const T* __restrict x = (const T*)x_data;
  const T* __restrict y = (const T*)(F::kOperands == 2 ? y_data : x_data);
  R* __restrict out = (R*)out_data;
  if constexpr (kScalar == ScalarSide::kLeft) {
    const T a = x[0];
    for (int64_t i = begin; i < end; ++i) out[i] = F::Of(a, y[i]);
  } else if constexpr (kScalar == ScalarSide::kRight) {
    const T b = y[0];
    for (int64_t i = begin; i < end; ++i) out[i] = F::Of(x[i], b);
  } else if constexpr (F::kOperands == 2) {
    for (int64_t i = begin; i < end; ++i) out[i] = F::Of(x[i], y[i]);
  } else {
    for (int64_t i = begin; i < end; ++i) out[i] = F::Of(x[i], x[i]);
  }
}

#if defined(__AVX2__)
void Stream(void* to, const void* from, int64_t bytes) {
  const int64_t whole = bytes / sizeof(__m256i);
  for (int64_t i = 0; i < whole; ++i) {
    _mm256_stream_si256((__m256i*)to + i, _mm256_load_si256((const __m256i*)from + i));
  }
  memcpy((__m256i*)to + whole, (const __m256i*)from + whole, bytes % sizeof(__m256i));
}
#elif defined(__SSE2__)
void Stream(void* to, const void* from, int64_t bytes) {
  const int64_t whole = bytes / sizeof(__m128i);
  for (int64_t i = 0; i < whole; ++i) {
    _mm_stream_si128((__m128i*)to + i, _mm_load_si128((const __m128i*)from + i));
  }
  memcpy((__m128i*)to + whole, (const __m128i*)from + whole, bytes % sizeof(__m128i));
}
#else
constexpr void (*Stream)(void*, const void*, int64_t) = nullptr;
#endif

template <typename F, typename T>
bool OfScalar(ScalarSide scalar, ElementType own, Elementwise* found) {
  using R = decltype(F::Of(T{}, T{}));
  using Part = typename PartOf<T>::Type;
  found->operands = F::kOperands;
  found->own = own;
  found->scalar = scalar;
  found->stream = Stream;
  found->out = sizeof(R) == sizeof(T)      ? own
               : sizeof(Part) == sizeof(float) ? ElementType::kF32
                                               : ElementType::kF64;
  if (scalar == ScalarSide::kNone) {
    found->run = RunElementwise<F, T, ScalarSide::kNone>;
    return true;
  }
  if constexpr (F::kOperands == 2) {
    found->run = scalar == ScalarSide::kLeft ? RunElementwise<F, T, ScalarSide::kLeft>
                                             : RunElementwise<F, T, ScalarSide::kRight>;
    return true;
  }
  return false;
}

template <typename F>
bool OfType(ElementType type, ScalarSide scalar, Elementwise* found) {
  switch (type) {
    case ElementType::kF32:
      return OfScalar<F, float>(scalar, type, found);
    case ElementType::kF64:
      return OfScalar<F, double>(scalar, type, found);
    case ElementType::kC64:
      return OfScalar<F, Complex<float>>(scalar, type, found);
    default:
      return OfScalar<F, Complex<double>>(scalar, type, found);
  }
}

bool FindElementwise(const char* name, int64_t length, ElementType type,
                     ScalarSide scalar, Elementwise* found) {
#define TRACEA_ROW(own, F)                                             \
  if (length == sizeof(own) - 1 && memcmp(name, own, length) == 0) { \
    return OfType<F>(type, scalar, found);                             \
  }
  ELEMENTWISE_TABLE(TRACEA_ROW)
#undef TRACEA_ROW
  return false;
}
