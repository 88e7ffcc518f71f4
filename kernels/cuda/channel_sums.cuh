// channel_sums: two sums over the rows of a matrix, for each channel, in one pass:
//
//   moments:   sum x,      sum x^2
//   gradient:  sum dz,     sum dz (x - center)
//
// dz is dy, or the sum of two arrays, rounded to an element; through a relu it is zero unless
//
//   relu of an argument:  (x - center) factor + shift, rounded to an element, is positive
//   relu with a result:   the entry of `y` is
//
// and it may be written. Each block adds some of the rows; `parts`, of (gridDim.x, 2, channels),
// are to be added by what comes next. All sums are of f32, in an order that is always the same.
//
// Assumes that the channels are a multiple of a pack's, and arrays aligned to 16 bytes.
#pragma once

#include "tile/block_columns.cuh"
#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

struct ChannelSumsParams {
  const void* x;
  const void* dy;
  const void* more;  // the second array of dy
  const void* y;
  const float* center;
  const float* factor;
  const float* shift;
  void* dz;
  float* parts;
};

// 16 bytes that no thread writes while the kernel runs, past the first cache.
TRACEA_DEVICE Words load_streamed(const void* from) {
  Words words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.w[0]), "=r"(words.w[1]), "=r"(words.w[2]), "=r"(words.w[3])
               : "l"(from));
  return words;
}

// kCount neighbouring numbers of f32, one for each channel of a pack.
template <int kCount>
TRACEA_DEVICE void load_each(const float* from, float (&values)[kCount]) {
  TRACEA_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    const Pack<float> pack = load_pack(from + i);
    TRACEA_UNROLL
    for (int j = 0; j < 4; ++j) values[i + j] = pack.x[j];
  }
}

enum class ReluOf { kNone, kArgument, kResult };

// Traits: Element; kThreads, kLanes (see tile/block_columns.cuh), kUnroll (rows of a thread in
// flight), kGradients (arrays of dy, 0 of moments), kRelu, kKeeps (whether dz is written),
// kLeast (the largest f32 that rounds to zero in an element).
template <class Traits>
class ChannelSums {
 public:
  using Element = typename Traits::Element;
  using Values = Pack<Element>;
  static constexpr int kCount = Values::kSize, kUnroll = Traits::kUnroll;
  using Columns = BlockColumns<Element, Traits::kThreads, Traits::kLanes, kUnroll>;
  static constexpr bool kIsGradient = Traits::kGradients > 0;
  static constexpr bool kReadsResult = Traits::kRelu == ReluOf::kResult;

  TRACEA_DEVICE ChannelSums(const ChannelSumsParams& p, int rows, int channels)
      : p_(p), at_(rows, channels) {
    if (at_.begin >= at_.end) return;
    const int channel = at_.pack * kCount;
    if constexpr (kIsGradient) load_each(p.center + channel, center_);
    if constexpr (Traits::kRelu == ReluOf::kArgument) {
      load_each(p.factor + channel, factor_);
      load_each(p.shift + channel, shift_);
    }
  }

  TRACEA_DEVICE void run(int channels) {
    i64 first = at_.first;
    for (int row = at_.begin; row < at_.end; row += at_.stride) {
      Row rows[kUnroll];
      TRACEA_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * Columns::kRows < at_.end) load(rows[u], first + u * at_.step);
      }
      TRACEA_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * Columns::kRows < at_.end) add(rows[u], first + u * at_.step);
      }
      first += static_cast<i64>(at_.stride) * channels;
    }
    float* out = p_.parts + static_cast<i64>(blockIdx.x) * 2 * channels;
    store_column_sums<Columns, Traits::kThreads, Traits::kLanes>(sums_, out, channels);
  }

 private:
  // A pack of each array, as it lies in memory.
  struct Row {
    Words x, dy, more, y;
  };

  TRACEA_DEVICE static Words words(const void* array, i64 element) {
    return load_streamed(static_cast<const Element*>(array) + element);
  }

  TRACEA_DEVICE void load(Row& row, i64 element) const {
    row.x = words(p_.x, element);
    if constexpr (kIsGradient) row.dy = words(p_.dy, element);
    if constexpr (Traits::kGradients == 2) row.more = words(p_.more, element);
    if constexpr (kReadsResult) row.y = words(p_.y, element);
  }

  TRACEA_DEVICE void add(const Row& row, i64 element) {
    Values v = Values::from(row.x);
    if constexpr (!kIsGradient) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        sums_[0][i] += v.x[i];
        sums_[1][i] = fmaf(v.x[i], v.x[i], sums_[1][i]);
      }
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) v.x[i] -= center_[i];
      const Values dz = gradient(row, v);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        sums_[0][i] += dz.x[i];
        sums_[1][i] = fmaf(dz.x[i], v.x[i], sums_[1][i]);
      }
      if constexpr (Traits::kKeeps) store_pack(static_cast<Element*>(p_.dz) + element, dz);
    }
  }

  // dz, of entries whose x - center is v. Selected, not multiplied: what relu cuts off may be
  // inf or NaN.
  TRACEA_DEVICE Values gradient(const Row& row, const Values& v) const {
    Values dz = Values::from(row.dy);
    if constexpr (Traits::kGradients == 2) {
      const Values more = Values::from(row.more);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) dz.x[i] += more.x[i];
      dz = Values::from(dz.words());
    }
    if constexpr (Traits::kRelu == ReluOf::kArgument) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float argument = fmaf(v.x[i], factor_[i], shift_[i]);
        dz.x[i] = argument > Traits::kLeast ? dz.x[i] : 0.0f;
      }
    } else if constexpr (kReadsResult) {
      const Values y = Values::from(row.y);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) dz.x[i] = y.x[i] > 0.0f ? dz.x[i] : 0.0f;
    }
    return dz;
  }

  const ChannelSumsParams& p_;
  Columns at_;
  float sums_[2][kCount] = {};
  float center_[kCount], factor_[kCount], shift_[kCount];
};

template <class Traits>
TRACEA_DEVICE void channel_sums(const ChannelSumsParams& p, int rows, int channels) {
  ChannelSums<Traits>(p, rows, channels).run(channels);
}

}  // namespace tracea
