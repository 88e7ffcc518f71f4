// Elementwise functions. Written by tracea_jax/emit/elementwise.py from the table in
// tracea_jax/problem/elementwise.py; a test compares.

// Powers of two: above kHuge squares may overflow, below kTiny vanish.
template <typename T>
struct Scales;
template <>
struct Scales<float> {
  static constexpr float kHuge = 0x1p60f, kTiny = 0x1p-60f, kMost = 0x1.fffffep127f;
  static constexpr float kUp = 0x1p100f, kDown = 0x1p-100f;
};
template <>
struct Scales<double> {
  static constexpr double kHuge = 0x1p500, kTiny = 0x1p-500,
                          kMost = 0x1.fffffffffffffp1023;
  static constexpr double kUp = 0x1p600, kDown = 0x1p-600;
};

// The length of (re, im), both scaled so that their squares are normal numbers.
template <typename T>
[[gnu::always_inline]] inline T length(T re, T im) {
  using S = Scales<T>;
  const T a = magnitude(re), b = magnitude(im), larger = a > b ? a : b;
  const bool is_huge = larger > S::kHuge, is_tiny = larger < S::kTiny;
  const T scale = is_huge ? S::kDown : is_tiny ? S::kUp : T(1);
  const T back = is_huge ? S::kUp : is_tiny ? S::kDown : T(1);
  const T x = re * scale, y = im * scale;
  const T found = root(x * x + y * y) * back;
  return a > S::kMost ? a : b > S::kMost ? b : found;
}

// x / y by R. L. Smith, Algorithm 116 (1962): both are divided by the larger part of y.
// Divided by zero, the parts of x are multiplied with infinity.
template <typename T>
[[gnu::always_inline]] inline Complex<T> quotient(Complex<T> x, Complex<T> y) {
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
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return x + y;
  }
  template <typename T>
  [[gnu::always_inline]] static inline Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re + y.re, x.im + y.im};
  }
};

struct Subtract {
  static constexpr int kOperands = 2;
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return x - y;
  }
  template <typename T>
  [[gnu::always_inline]] static inline Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re - y.re, x.im - y.im};
  }
};

struct Multiply {
  static constexpr int kOperands = 2;
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return x * y;
  }
  template <typename T>
  [[gnu::always_inline]] static inline Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
  }
};

struct Divide {
  static constexpr int kOperands = 2;
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return x / y;
  }
  template <typename T>
  [[gnu::always_inline]] static inline Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return quotient(x, y);
  }
};

struct Negative {
  static constexpr int kOperands = 1;
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return -x;
  }
  template <typename T>
  [[gnu::always_inline]] static inline Complex<T> Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return {-x.re, -x.im};
  }
};

struct Abs {
  static constexpr int kOperands = 1;
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {
    return magnitude(x);
  }
  template <typename T>
  [[gnu::always_inline]] static inline T Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {
    return length(x.re, x.im);
  }
};

#define ELEMENTWISE_TABLE(ROW) \
  ROW("add", Add) \
  ROW("subtract", Subtract) \
  ROW("multiply", Multiply) \
  ROW("divide", Divide) \
  ROW("negative", Negative) \
  ROW("abs", Abs)
