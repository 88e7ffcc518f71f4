// Activations on vectors of f32. Included by the kernels with an epilogue, after
// common/vec_impl.h.
//
// All of them propagate NaN. At infinity they are what their formulas give, as XLA's and
// those on GPUs are: x for x = +inf; of -inf relu is 0, gelu and silu are -inf * 0, which
// is NaN, so that a product that overflows does not go unnoticed.

// x, or a limit beyond it; NaN stays.
TRACEA_INLINE Vec Clamp(float low, Vec x, float high) {
#if defined(__AVX512F__)  // an instruction each, of which the second operand wins as NaN
  const __m512 least = _mm512_maskz_min_ps(0xffff, (__m512)Splat(high), (__m512)x);
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)Splat(low), least);
#else
  x = Select(x > high, Splat(high), x);
  return Select(x < low, Splat(low), x);
#endif
}

// p 2^n for whole n within [-126, 126], of which `shifted` has the low bits.
TRACEA_INLINE Vec TimesPowerOfTwo(Vec p, [[maybe_unused]] Vec n,
                                  [[maybe_unused]] Vec shifted) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  return p * AsVec((AsBits(shifted) << 23) + 0x3f800000);
#endif
}

// exp(x) with a relative error below 1.2e-7, for x clamped to [-87, 87].
//
// x = n ln2 + r with |r| <= ln2 / 2;  exp(r) = 1 + r + r^2 q(r), where q has degree 4 and
// is minimax for the relative error (3.1e-9). Adding 1.5 * 2^23 leaves round(x / ln2) in
// the low bits of the mantissa, so no conversion to integer is needed and NaN is safe.
TRACEA_INLINE Vec Exp(Vec x) {
  x = Clamp(-87.0f, x, 87.0f);
  const Vec shifted = x * 1.44269504f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec q = r * 1.38144673e-3f + 8.36878054e-3f;
  q = q * r + 4.16683942e-2f;
  q = q * r + 1.66665201e-1f;
  q = q * r + 4.99999934e-1f;
  return TimesPowerOfTwo((q * r) * r + r + 1.0f, n, shifted);
}

// 1 / x for x in [1, 2^126].
TRACEA_INLINE Vec Reciprocal(Vec x) {
#if defined(__AVX512F__)
  // A full division occupies the divider for 16 cycles or more. One Newton step takes
  // the 14-bit estimate to full precision.
  const Vec y = (Vec)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// The sigmoid function of -x.
TRACEA_INLINE Vec SigmoidOfMinus(Vec x) { return Reciprocal(1.0f + Exp(x)); }

// y, or x * 0 where x is below a limit.
TRACEA_INLINE Vec ZeroBelow(float limit, Vec x, Vec y) {
  return Select(x < limit, x * 0.0f, y);
}

struct Identity {
  static TRACEA_INLINE Vec Apply(Vec x) { return x; }
};

struct Relu {
  static TRACEA_INLINE Vec Apply(Vec x) { return Select(x < 0.0f, Vec{}, x); }
};

struct Silu {
  static TRACEA_INLINE Vec Apply(Vec x) {
    return ZeroBelow(-87.0f, x, x * SigmoidOfMinus(-x));
  }
};

// x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
struct Gelu {
  static TRACEA_INLINE Vec Apply(Vec x) {
    const Vec minus_2u = x * (-1.59576912f - 0.0713548163f * (x * x));
    return ZeroBelow(-10.0f, x, x * SigmoidOfMinus(minus_2u));
  }
};

// x Phi(x), Phi(-|x|) = erfc(y) / 2 with y = |x| / sqrt(2).
//
// erfc(y) = exp(-y^2) t P(t), t = 1 / (1 + y/2), P of degree 7, minimax for the relative
// error (4.4e-8) on 0 <= y <= 10.2: accurate in the tail too, where 1 + erf cancels.
struct GeluExact {
  static TRACEA_INLINE Vec Apply(Vec x) {
    const Vec magnitude = AsVec(AsBits(x) & 0x7fffffff);
    Vec y = magnitude * 0.707106781f;
    y = Select(y > 10.2f, Splat(10.2f), y);
    const Vec t = Reciprocal(1.0f + 0.5f * y);
    Vec p = t * -0.0591243319f + 0.284845769f;
    p = p * t + -0.487762064f;
    p = p * t + 0.278712124f;
    p = p * t + -0.0270713475f;
    p = p * t + 0.202876076f;
    p = p * t + 0.243055761f;
    p = p * t + 0.282381922f;
    p = p * t + 0.282086045f;
    // -y^2 = -x^2 / 2: squaring x, which is exact, not y, which was rounded.
    const Vec tail = 0.5f * (p * t) * Exp(-0.5f * (x * x));
    const Vec phi = Select(x > 0.0f, 1.0f - tail, tail);
    return ZeroBelow(-13.0f, x, x * phi);
  }
};
