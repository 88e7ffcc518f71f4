// Softmax of rows of scores in base 2: the exponential, masks and bias. A part of
// attention/common_impl.h.

constexpr float kLowest = -3.40282347e38f;
constexpr float kForbidden = -__builtin_inff();  // a score that gets the weight 0

// 2^x with a relative error below 1.7e-7; 0 below -126, so that weights are never
// subnormal (their products would be slow).
//
// x = n + r with |r| <= 1/2;  2^r is a polynomial of degree 5 with p(0) = 1, minimax for
// the relative error (9.1e-8).
TRACEA_INLINE Vec Exp2Polynomial(Vec r) {
  Vec p = r * 1.32647273e-3f + 9.67151299e-3f;
  p = p * r + 5.55073358e-2f;
  p = p * r + 2.40222424e-1f;
  p = p * r + 6.93147004e-1f;
  return p * r + 1.0f;
}

#if defined(__AVX512DQ__)
TRACEA_INLINE Vec Exp2(Vec x) {
  const __m512 r = _mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Vec p = Exp2Polynomial((Vec)r);
  const __mmask16 zero = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_LT_OQ);
  return (Vec)_mm512_maskz_scalef_ps(~zero, (__m512)p, (__m512)(x - (Vec)r));
}
#else
// Adding 1.5 * 2^23 leaves round(x) in the low bits of the mantissa. For x <= 127.
TRACEA_INLINE Vec Exp2(Vec x) {
  const Vec shifted = x + 12582912.0f;
  const Vec p = Exp2Polynomial(x - (shifted - 12582912.0f));
  const Vec power = AsVec((AsBits(shifted) << 23) + 0x3f800000);
  return Select(x < -126.0f, Vec{}, p * power);
}
#endif

TRACEA_INLINE Vec Maximum(Vec a, Vec b) { return Select(a > b, a, b); }

// All lanes folded into one, by halves.
#if defined(__AVX2__)
template <typename Op>
TRACEA_INLINE float Fold(Vec x) {
#if defined(__AVX512DQ__)
  const __m256 lower = _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 0);
  const __m256 eight = Op::Of(lower, _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 1));
#else
  const __m256 eight = (__m256)x;
#endif
  const __m128 four =
      Op::Of(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = Op::Of(four, _mm_movehl_ps(four, four));
  return Op::Of(two[0], two[1]);
}
#else
template <typename Op>
TRACEA_INLINE float Fold(Vec x) {
  return Op::Of(Op::Of(x[0], x[2]), Op::Of(x[1], x[3]));
}
#endif

// By how much, in base 2, scores may exceed what is subtracted from them: sums are scaled
// anew only when a row's maximum grows by more, which is seldom after the first keys.
constexpr float kMaxSlack = 8;

// A block of keys in the online softmax of up to kLanes rows, side by side: to fold single
// rows and to wait for each one's maximum would take longer than the exponentials.
//
//   TakeMaximum of each row;  Shift;  AddWeights of each row;  Finish
struct SoftmaxRows {
  Vec lanes[kLanes];    // of each row: its largest scores, then its sums of weights
  float shift[kLanes];  // weights are 2^(score - shift)
  float alpha[kLanes];  // what earlier sums must be scaled by

  TRACEA_INLINE void TakeMaximum(int64_t i, const float* scores, int64_t vecs) {
    Vec most = Splat(kForbidden), other = most;
    for (; vecs > 1; vecs -= 2, scores += 2 * kLanes) {
      most = Maximum(Load(scores), most);
      other = Maximum(Load(scores + kLanes), other);
    }
    if (vecs > 0) most = Maximum(Load(scores), most);
    lanes[i] = Maximum(most, other);
  }

  // `max`: what was subtracted from each row's scores before, and is from now on. `scale`
  // is what scores are still to be multiplied by, above zero.
  TRACEA_INLINE void Shift(int64_t rows, float scale, float* max) {
    for (int64_t i = rows; i < kLanes; ++i) lanes[i] = Vec{};
    const Vec most = FoldEach<Largest>(lanes) * scale;
    const Vec before = LoadUpTo((const F32*)max, rows);
    const Vec now = Select(most > before + kMaxSlack, most, before);
    StoreUpTo((F32*)max, now, rows);
    Store(shift, now);
    Store(alpha, Exp2(before - now));
  }

  TRACEA_INLINE void AddWeights(int64_t i, Vec total) { lanes[i] = total; }

  TRACEA_INLINE void Finish(int64_t rows, float* sum) {
    for (int64_t i = rows; i < kLanes; ++i) lanes[i] = Vec{};
    const Vec total = FoldEach<Plus>(lanes);
    const Vec before = LoadUpTo((const F32*)sum, rows);
    StoreUpTo((F32*)sum, before * Load(alpha) + total, rows);
  }
};

TRACEA_INLINE Vec Iota() {
  Vec x{};
  for (int i = 0; i < kLanes; ++i) x[i] = (float)i;
  return x;
}

// Half-open interval of positions.
struct Interval {
  int64_t lo, hi;
};

TRACEA_INLINE Interval Intersect(Interval a, Interval b) {
  const int64_t lo = Max(a.lo, b.lo), hi = Min(a.hi, b.hi);
  return lo < hi ? Interval{lo, hi} : Interval{0, 0};
}

// The smallest interval that holds both.
TRACEA_INLINE Interval Hull(Interval a, Interval b) {
  if (a.lo == a.hi) return b;
  if (b.lo == b.hi) return a;
  return {Min(a.lo, b.lo), Max(a.hi, b.hi)};
}

// Forbids scores[i] where i is outside of the interval, for i in [0, count).
TRACEA_INLINE void ForbidOutside(Interval allowed, float* scores, int64_t count) {
  const Vec lo = Splat((float)allowed.lo), hi = Splat((float)allowed.hi);
  for (int64_t i = 0; i < count; i += kLanes) {
    if (i >= allowed.lo && i + kLanes <= allowed.hi) continue;
    const Vec at = Iota() + Splat((float)i);
    const Mask inside = (at >= lo) & (at < hi);
    Store(scores + i, Select(inside, Load(scores + i), Splat(kForbidden)));
  }
}

TRACEA_INLINE float LoadElement(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::kF32:
      return ((const float*)data)[i];
    case DType::kBF16:
      return LoadPartial((const BF16*)data + i, 1)[0];
    default:
      return LoadPartial((const F16*)data + i, 1)[0];
  }
}

// A score in base 2 with its bias, which is in base e. A bias of the lowest number is a mask
// to many: it must not become infinite, but -inf stays.
TRACEA_INLINE Vec Biased(Vec score, Vec bias) {
  const Vec sum = score + bias * kLog2E;
  const Vec lowest = (score + bias) * 0x1p-40f + kLowest;  // kLowest unless it is -inf
  return Select(sum < kLowest, lowest, sum);
}

template <typename T>
void AddBiasRow(const T* bias, float* scores, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Store(scores + i, Biased(Load(scores + i), LoadUpTo(bias + i, count - i)));
  }
}

// scores[j] += log2(e) * the bias at (b, h, i, j0 + j), for j in [0, count); lanes up to
// the next vector may be written.
void AddBias(const AttentionArgs& args, int64_t b, int64_t h, int64_t i, int64_t j0,
             float* scores, int64_t count) {
  const int64_t* s = args.bias_strides;
  const int64_t at = b * s[0] + h * s[1] + i * s[2] + j0 * s[3];
  if (s[3] == 0) {
    const Vec x = Splat(LoadElement(args.bias, args.bias_type, at));
    for (int64_t j = 0; j < count; j += kLanes) {
      Store(scores + j, Biased(Load(scores + j), x));
    }
  } else if (args.bias_type == DType::kF32) {
    AddBiasRow((const F32*)args.bias + at, scores, count);
  } else if (args.bias_type == DType::kBF16) {
    AddBiasRow((const BF16*)args.bias + at, scores, count);
  } else {
    AddBiasRow((const F16*)args.bias + at, scores, count);
  }
}

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t BytesAny __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Forbids the scores of keys that the mask forbids.
void ApplyMask(const AttentionArgs& args, int64_t b, int64_t h, int64_t i, int64_t j0,
               float* scores, int64_t count) {
  const int64_t* s = args.mask_strides;
  const uint8_t* mask = args.mask + b * s[0] + h * s[1] + i * s[2] + j0 * s[3];
  if (s[3] == 0) {
    if (*mask) return;
    for (int64_t j = 0; j < count; ++j) scores[j] = kForbidden;
    return;
  }
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    const Bytes bytes = *(const BytesAny*)(mask + j);
    const Mask allowed = __builtin_convertvector(bytes, Mask) != 0;
    Store(scores + j, Select(allowed, Load(scores + j), Splat(kForbidden)));
  }
  for (; j < count; ++j) scores[j] = mask[j] ? scores[j] : kForbidden;
}
