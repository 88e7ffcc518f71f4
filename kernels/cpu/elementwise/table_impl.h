// Elementwise functions. Written by tracea_jax/emit/elementwise.py from the table in
// tracea_jax/problem/elementwise.py; a test compares.

// The length of (re, im). Squares of floats neither overflow nor vanish in double.
TRACEA_INLINE float length(float re, float im) {
  const double x = re, y = im;
  const float found = (float)__builtin_sqrt(x * x + y * y), most = 3.4028235e38f;
  const float a = magnitude(re), b = magnitude(im);
  return a > most ? a : b > most ? b : found;
}

// Doubles are scaled by powers of two where their squares would overflow or vanish.
TRACEA_INLINE double length(double re, double im) {
  const double a = magnitude(re), b = magnitude(im), larger = a > b ? a : b;
  const bool is_huge = larger > 0x1p500, is_tiny = larger < 0x1p-500;
  const double down = is_huge ? 0x1p-600 : is_tiny ? 0x1p600 : 1.0;
  const double up = is_huge ? 0x1p600 : is_tiny ? 0x1p-600 : 1.0;
  const double x = re * down, y = im * down, most = 1.7976931348623157e308;
  const double found = __builtin_sqrt(x * x + y * y) * up;
  return a > most ? a : b > most ? b : found;
}

// x / y by R. L. Smith, Algorithm 116 (1962): both are divided by the larger part of y.
// Divided by zero, the parts of x are multiplied with infinity.
template <typename T>
TRACEA_INLINE Complex<T> quotient(Complex<T> x, Complex<T> y) {
  const bool is_zero = (y.re == 0) & (y.im == 0);
  const bool is_real = magnitude(y.re) >= magnitude(y.im);
  const T large = is_real ? y.re : y.im, small = is_real ? y.im : y.re;
  const T ratio = small / large;
  const T scale = T(1) / (is_zero ? T(0) : large + small * ratio);
  const T re = is_real ? x.re + x.im * ratio : x.re * ratio + x.im;
  const T im = is_real ? x.im - x.re * ratio : x.im * ratio - x.re;
  return {(is_zero ? x.re : re) * scale, (is_zero ? x.im : im) * scale};
}

struct Add {
  static constexpr int kOperands = 2;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return x + y;
  }
  template <typename T>
  static TRACEA_INLINE Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re + y.re, x.im + y.im};
  }
};

struct Subtract {
  static constexpr int kOperands = 2;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return x - y;
  }
  template <typename T>
  static TRACEA_INLINE Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re - y.re, x.im - y.im};
  }
};

struct Multiply {
  static constexpr int kOperands = 2;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return x * y;
  }
  template <typename T>
  static TRACEA_INLINE Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
  }
};

struct Divide {
  static constexpr int kOperands = 2;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return x / y;
  }
  template <typename T>
  static TRACEA_INLINE Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return quotient(x, y);
  }
};

struct Negative {
  static constexpr int kOperands = 1;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return -x;
  }
  template <typename T>
  static TRACEA_INLINE Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {-x.re, -x.im};
  }
};

struct Abs {
  static constexpr int kOperands = 1;
  template <typename T>
  static TRACEA_INLINE T Of(T x, [[maybe_unused]] T y) {
    return magnitude(x);
  }
  template <typename T>
  static TRACEA_INLINE T Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return length(x.re, x.im);
  }
};

#define TRACEA_ELEMENTWISE(ROW) \
  ROW("add", Add) \
  ROW("subtract", Subtract) \
  ROW("multiply", Multiply) \
  ROW("divide", Divide) \
  ROW("negative", Negative) \
  ROW("abs", Abs)
