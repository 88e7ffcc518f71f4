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
// and it may be written. Each block adds a range of rows; `parts`, of (gridDim.x, 2, channels),
// are to be added by what comes next. All sums are of f32, in an order that is always the same.
//
// Assumes that the channels are a multiple of a pack's, and arrays aligned to 16 bytes.
#pragma once

#include "norm/block_columns.cuh"
#include "norm/pack.cuh"
#include "tile/common.cuh"

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

enum class ReluOf { kNone, kArgument, kResult };

// Traits: Element; kThreads, kLanes (see norm/block_columns.cuh), kUnroll (rows of a thread in
// flight), kGradients (arrays of dy, 0 of moments), kRelu, kKeeps (whether dz is written),
// kLeast (the largest f32 that rounds to zero in an element).
template <class Traits>
class ChannelSums {
 public:
  using Element = typename Traits::Element;
  using Packed = Pack<Element>;
  using Columns = BlockColumns<Element, Traits::kThreads, Traits::kLanes>;
  static constexpr int kCount = Packed::kCount, kUnroll = Traits::kUnroll;
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
    for (int row = at_.begin; row < at_.end; row += kUnroll * Columns::kRows) {
      Row rows[kUnroll];
      TRACEA_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * Columns::kRows < at_.end) load(rows[u], first + u * at_.step);
      }
      TRACEA_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * Columns::kRows < at_.end) add(rows[u], first + u * at_.step);
      }
      first += kUnroll * at_.step;
    }
    float* out = p_.parts + static_cast<i64>(blockIdx.x) * 2 * channels;
    store_column_sums<Columns, Traits::kThreads, Traits::kLanes>(sums_, out, channels);
  }

 private:
  // One pack of each array.
  struct Row {
    Packed x, dy, more, y;
  };

  TRACEA_DEVICE static Packed pack(const void* array, i64 element) {
    return Packed::load(static_cast<const Element*>(array) + element);
  }

  TRACEA_DEVICE void load(Row& row, i64 element) const {
    row.x = pack(p_.x, element);
    if constexpr (kIsGradient) row.dy = pack(p_.dy, element);
    if constexpr (Traits::kGradients == 2) row.more = pack(p_.more, element);
    if constexpr (kReadsResult) row.y = pack(p_.y, element);
  }

  TRACEA_DEVICE void add(const Row& row, i64 element) {
    float v[kCount];
    row.x.widen(v);
    if constexpr (!kIsGradient) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        sums_[0][i] += v[i];
        sums_[1][i] = fmaf(v[i], v[i], sums_[1][i]);
      }
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) v[i] -= center_[i];
      float dz[kCount];
      gradient(row, v, dz);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        sums_[0][i] += dz[i];
        sums_[1][i] = fmaf(dz[i], v[i], sums_[1][i]);
      }
      if constexpr (Traits::kKeeps) {
        Packed::narrow(dz).store(static_cast<Element*>(p_.dz) + element);
      }
    }
  }

  // dz, of entries whose x - center is v. Selected, not multiplied: what relu cuts off may be
  // inf or NaN.
  TRACEA_DEVICE void gradient(const Row& row, const float (&v)[kCount],
                              float (&dz)[kCount]) const {
    row.dy.widen(dz);
    if constexpr (Traits::kGradients == 2) {
      float more[kCount];
      row.more.widen(more);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) dz[i] += more[i];
      Packed::narrow(dz).widen(dz);
    }
    if constexpr (Traits::kRelu == ReluOf::kArgument) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        dz[i] = fmaf(v[i], factor_[i], shift_[i]) > Traits::kLeast ? dz[i] : 0.0f;
      }
    } else if constexpr (kReadsResult) {
      float y[kCount];
      row.y.widen(y);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) dz[i] = y[i] > 0.0f ? dz[i] : 0.0f;
    }
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
