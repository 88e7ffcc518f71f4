// Softmax of rows whose scores arrive block by block, in the registers of a warpgroup.
//
// A thread holds columns of two rows, register i of its fragment those of row half
// (i / 2) % 2; four lanes share a row. With c = scale log2(e), a block of scores s updates
//
//     m' = max s, if c (max s - m) > kSlack, else m
//     alpha = 2^(c (m - m'))    p = 2^(c s - c m')
//     l' = alpha l + sum p      o' = alpha o + p v
//
// so that weights are at most 2^kSlack, and sums are seldom multiplied. m is that of the
// row, l only the lane's own part until the end. A score that must not
// count is kMasked if the key exists, else kNoKey. kMasked is finite, so that no difference of
// two infinities arises, and a power of two, so that c kMasked is exact. A row all of whose
// scores are masked weighs its keys equally, as jax.nn does.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

constexpr float kMasked = -1.2676506e30f;  // -2^100
constexpr float kNoKey = -3.4028235e38f;     // the least f32: weighs 0 beside kMasked
// What jax.nn puts in the place of a masked score: -0.7 of the largest f32.
constexpr float kMaskedByJax = -2.3819763e38f;

constexpr float kSlack = 8.0f;
constexpr int kChains = 2;  // of a row's maximum and sum, that do not wait for each other

// kMasked in the place of a lower score that is not -inf.
TRACEA_DEVICE float not_below_masked(float v) {
  return __float_as_uint(v) == 0xFF800000u ? v : (v < kMasked ? kMasked : v);
}

TRACEA_DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}
TRACEA_DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
  return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2);
}

// A weight more in a row, that of the logit `sink`: sums with weights 2^(c s - most) and
// their total become those of a larger `most`, and factor what sums are multiplied with.
TRACEA_DEVICE void add_sink(float sink, float& most, float& total, float& factor) {
  constexpr float kLog2E = 1.442695040888963f;
  const float of_sink = sink * kLog2E, larger = max_nan(most, of_sink);
  const float shrink = larger == most ? 1.0f : ex2_approx(most - larger);
  total = fmaf(total, shrink, ex2_approx(of_sink - larger));
  factor = shrink / total;
  most = larger;
}

// ln of the sum of weights 2^most; what jax.nn has if the row has seen no key.
TRACEA_DEVICE float log_sum_exp(float most, float total, bool has_seen) {
  constexpr float kLn2 = 0.693147180559945f;
  return has_seen ? fmaf(most, kLn2, logf(total)) : kMaskedByJax;
}

class OnlineSoftmax {
 public:
  TRACEA_DEVICE explicit OnlineSoftmax(float scale) : c_(scale) { reset(); }

  TRACEA_DEVICE void reset() {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      max_[half] = kMasked;
      sum_[half] = 0.0f;
    }
  }

  // Scores become weights; leaves in `alpha` what earlier sums are multiplied with. Whether
  // that is 1 for all rows of the warp.
  //
  // kClamps: scores may be lower than kMasked, and then count as that, but for -inf. Of a row
  // whose largest score is higher they weigh nothing anyway.
  template <bool kClamps = false, int kCount>
  TRACEA_DEVICE bool update(float (&s)[kCount], float (&alpha)[2]) {
    float most[2], shift[2];
    largest(s, most);
    if constexpr (kClamps) {
      if (__any_sync(0xFFFFFFFFu, fminf(most[0], most[1]) <= kMasked)) {
        TRACEA_UNROLL
        for (int i = 0; i < kCount; ++i) s[i] = not_below_masked(s[i]);
        largest(s, most);
      }
    }
    const bool is_same = grow(most, alpha, shift);
    weigh(s, alpha, [&](float score, int half) { return fmaf(score, c_, -shift[half]); });
    return __all_sync(0xFFFFFFFFu, is_same);
  }

  // The same for scores x of which `cap` makes tanh(x), see tile/soft_cap.cuh.
  template <int kCount, class Cap>
  TRACEA_DEVICE bool update_capped(float (&s)[kCount], float (&alpha)[2], const Cap& cap) {
    float most[2], capped[2], shift[2];
    largest(s, most);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) capped[half] = cap(most[half]);
    const bool is_same = grow(capped, alpha, shift);
    if (cap.are_near(capped, c_)) {
      const auto curve = cap.curve(c_);
      weigh(s, alpha, [&](float x, int half) { return curve(x, -shift[half]); });
    } else {
      weigh(s, alpha, [&](float x, int half) { return fmaf(cap(x), c_, -shift[half]); });
    }
    return __all_sync(0xFFFFFFFFu, is_same);
  }

  // Keeps the assembler from computing the weights only after a wait that follows: sums of
  // weights are never negative, but it has to look.
  TRACEA_DEVICE void settle() const {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.lt.f32 p, %0, 0f00000000;\n"
        "@p nanosleep.u32 1;\n"
        "}" ::"f"(sum_[0] + sum_[1])
        : "memory");
  }

  // What the sums of a row are divided by, at the end.
  TRACEA_DEVICE float total(int half) const { return quad_sum(sum_[half]); }

  // Weights are 2^(c s - most).
  TRACEA_DEVICE float most(int half) const { return max_[half] * c_; }

  TRACEA_DEVICE bool has_seen(int half) const { return max_[half] != kMasked; }

  // Whether a mask hides all keys from a row. Scores that are all -inf leave a total of 0.
  TRACEA_DEVICE bool is_blind(int half) const {
    const float sum = total(half);  // of all lanes, also those of rows that have seen keys
    return !has_seen(half) && sum > 0.0f;
  }

  // Makes all rows blind: of a tile that sees no block.
  TRACEA_DEVICE void see_none() {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      max_[half] = kMasked;
      sum_[half] = 1.0f;
    }
  }

  // Lets rows have weights of 1 for `count` keys.
  TRACEA_DEVICE void see_all(const bool (&rows)[2], int count) {
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (rows[half]) sum_[half] = 0.25f * static_cast<float>(count);
    }
  }

 private:
  // Of the rows' scores.
  template <int kCount>
  TRACEA_DEVICE static void largest(const float (&s)[kCount], float (&row)[2]) {
    float most[2][kChains];
    TRACEA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      float& chain = most[i / 2 % 2][i / 4 % kChains];
      const float pair = fmaxf(s[i], s[i + 1]);
      chain = i / 4 < kChains ? pair : fmaxf(chain, pair);
    }
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      TRACEA_UNROLL
      for (int i = 1; i < kChains; ++i) most[half][0] = fmaxf(most[half][0], most[half][i]);
      row[half] = quad_max(most[half][0]);
    }
  }

  // Takes the largest scores of a block in. Weights are then 2^(c s - shift); whether that
  // is as it was.
  TRACEA_DEVICE bool grow(const float (&row)[2], float (&alpha)[2], float (&shift)[2]) {
    bool is_same = true;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float growth = (row[half] - max_[half]) * c_;
      const bool grows = growth > kSlack;
      alpha[half] = grows ? ex2_approx(-growth) : 1.0f;
      max_[half] = grows ? row[half] : max_[half];
      shift[half] = max_[half] * c_;
      is_same = is_same && !grows;
    }
    return is_same;
  }

  // Scores become weights, of the powers of two that `exponent` makes of them.
  template <int kCount, class Exponent>
  TRACEA_DEVICE void weigh(float (&s)[kCount], const float (&alpha)[2],
                           const Exponent& exponent) {
    float sum[2][kChains];
    TRACEA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      const int half = i / 2 % 2;
      s[i] = ex2_approx(exponent(s[i], half));
      s[i + 1] = ex2_approx(exponent(s[i + 1], half));
      float& chain = sum[half][i / 4 % kChains];
      const float pair = s[i] + s[i + 1];
      chain = i / 4 < kChains ? pair : chain + pair;
    }
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      TRACEA_UNROLL
      for (int i = 1; i < kChains; ++i) sum[half][0] += sum[half][i];
      sum_[half] = fmaf(sum_[half], alpha[half], sum[half][0]);
    }
  }

  const float c_;
  float max_[2], sum_[2];
};

}  // namespace tracea
