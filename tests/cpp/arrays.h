// Random operands in every dtype, and their values: what the tests of kernels share.

#ifndef TRACEA_TESTS_CPP_ARRAYS_H_
#define TRACEA_TESTS_CPP_ARRAYS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "common/types.h"

namespace tracea::cpu {

inline std::mt19937 rng(7);

inline int64_t Pick(std::initializer_list<int64_t> values) {
  return values.begin()[rng() % values.size()];
}

// From `least` to `most`, each octave as likely as any other.
inline int64_t PickSpread(int64_t least, int64_t most) {
  const double octaves = std::log2(double(most + 1) / double(least));
  const double at = std::uniform_real_distribution<double>(0, octaves)(rng);
  return std::min(most, int64_t(double(least) * std::exp2(at)));
}

inline int64_t ItemSize(DType type) { return type == DType::kF32 ? 4 : 2; }

inline double Decode(const void* data, DType type, int64_t i) {
  if (type == DType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  if (type == DType::kBF16) {
    const uint32_t u = uint32_t{h} << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa ? NAN : (h >> 15 ? -INFINITY : INFINITY);
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25)
                                    : std::ldexp(mantissa, -24);
  return h >> 15 ? -magnitude : magnitude;
}

// x has few bits: it is exact in every type.
inline void Encode(void* data, DType type, int64_t i, double x) {
  const float f = static_cast<float>(x);
  if (type == DType::kF32) {
    static_cast<float*>(data)[i] = f;
    return;
  }
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint16_t h = static_cast<uint16_t>(u >> 16);
  if (type == DType::kF16) {
    const uint32_t exponent = (u >> 23) & 255;
    const uint32_t bits =
        (u >> 16 & 0x8000) | ((exponent - 112) << 10) | (u >> 13 & 1023);
    h = static_cast<uint16_t>(exponent == 0 ? 0 : bits);
  }
  static_cast<uint16_t*>(data)[i] = h;
}

struct Array {
  DType type = DType::kF32;
  int64_t size = 0;
  std::vector<uint8_t> bytes;  // exactly as long as the data: a sanitizer sees overruns

  // Multiples of 1/32, at most `most` of them in magnitude.
  void* Fill(DType t, int64_t count, int most = 64) {
    return FillBy(t, count,
                  [&] { return (int(rng() % (2 * most + 1)) - most) / 32.0; });
  }
  // All mantissas of bf16, of exponents that differ: sums of products are not exact.
  void* FillSpread(DType t, int64_t count) {
    return FillBy(t, count, [] {
      const double sign = rng() % 2 ? 1 : -1, mantissa = 128 + rng() % 128;
      return sign * std::ldexp(mantissa, -8 - int(rng() % 8));
    });
  }
  void* Poison(DType t, int64_t count) {
    Resize(t, count, 0xff);
    return bytes.data();
  }
  double operator[](int64_t i) const {
    return values.empty() ? Decode(bytes.data(), type, i) : values[i];
  }

 private:
  // Of an operand, decoded once: references read each number as often as it is multiplied.
  std::vector<double> values;

  template <typename Next>
  void* FillBy(DType t, int64_t count, const Next& next) {
    Resize(t, count, 0);
    for (int64_t i = 0; i < count; ++i) Encode(bytes.data(), t, i, next());
    values.resize(count);
    for (int64_t i = 0; i < count; ++i) values[i] = Decode(bytes.data(), t, i);
    return bytes.data();
  }

  void Resize(DType t, int64_t count, uint8_t value) {
    type = t;
    size = count;
    values.clear();
    bytes.assign(count * ItemSize(t), value);
  }
};

inline double Activate(double z, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return std::max(z, 0.0);
    case Activation::kGelu:
      return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case Activation::kGeluExact:
      return 0.5 * z * std::erfc(-z / std::sqrt(2.0));
    case Activation::kSilu:
      return z / (1 + std::exp(-z));
  }
  return NAN;
}

}  // namespace tracea::cpu

#endif  // TRACEA_TESTS_CPP_ARRAYS_H_
