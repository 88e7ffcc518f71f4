// Attention and its gradient in double, and how far rounding may take a kernel from them.
//
// With u = 2^-24, what an error is made of, to first order:
//
//   sum of n products    (4 + sqrt n) u of the sum of their magnitudes: rounding errors
//                        add up as a random walk does (Higham and Mary, 2019)
//   score s              that of its product over head_dim and of its bias
//   weight e^(s - m)     relative to it: the error of s, which grows with the operands;
//                        u |s - m|; and what the exponential lacks, which may take all
//                        that is below 2^-126
//   o = sum w v / sum w  of numerator and denominator: w's relative errors e give up to
//                        sum p e |v| + |o| sum p e,  p = w / sum w
//
// and so on through the gradient. Constants are about kernels as they are meant to be:
// f32 sums, weights of bf16 operands rounded to bf16, results rounded once.

#ifndef TRACEA_TESTS_CPP_ATTENTION_REFERENCE_H_
#define TRACEA_TESTS_CPP_ATTENTION_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "attention/attention.h"

namespace tracea::cpu {

constexpr double kRoundoff = 0x1p-24;  // of f32
constexpr double kDeepest = 87;        // below the log-sum-exp: of weights that may be 0

// Relative errors by the type of the operands.
struct AttentionRounding {
  double stored;       // of a result
  double narrow;       // of weights and gradients of scores, as operands of a product
  double exponential;  // of e^x
  double tiny;         // absolute: half of the last place of the smallest numbers
};

inline AttentionRounding RoundingOf(DType type) {
  switch (type) {
    case DType::kF32:
      return {kRoundoff, 0, 4 * kRoundoff, 0x1p-126};
    case DType::kBF16:
      return {0x1p-8, 0x1p-8, 3e-6, 0x1p-126};
    case DType::kF16:
      return {0x1p-11, 0, 4 * kRoundoff, 0x1p-25};
  }
  return {};
}

// Of a sum of so many products, relative to the sum of their magnitudes.
inline double SumRounding(int64_t terms) {
  return (4 + std::sqrt(double(terms))) * kRoundoff;
}

struct Bounded {
  double value = 0, error = 0;  // to first order, and the largest that is allowed
};

class AttentionReference {
 public:
  std::vector<Bounded> out, lse;    // an lse of -infinity where a query sees no key
  std::vector<Bounded> dq, dk, dv;  // of a bias-free problem

  AttentionReference(const AttentionArgs& args, const Array& q, const Array& k,
                     const Array& v, const Array& bias, const Array& dout)
      : a_(args), q_(q), k_(k), v_(v), bias_(bias), dout_(dout),
        round_(RoundingOf(args.type)), in_dim_(SumRounding(args.head_dim)),
        in_keys_(SumRounding(args.kv_len)),
        in_queries_(SumRounding(args.q_len * args.group())) {
    const int64_t rows = a_.batch * a_.q_len * a_.heads;
    const int64_t keys = a_.batch * a_.kv_len * a_.kv_heads;
    lse.resize(rows);
    for (auto* queries : {&out, &dq}) queries->resize(rows * a_.head_dim);
    for (auto* of_keys : {&dk, &dv}) of_keys->resize(keys * a_.head_dim);
    for (int64_t b = 0; b < a_.batch; ++b) {
      for (int64_t h = 0; h < a_.heads; ++h) {
        for (int64_t i = 0; i < a_.q_len; ++i) AddQuery(b, h, i);
      }
    }
    for (auto* results : {&out, &dq, &dk, &dv}) {
      for (Bounded& x : *results) {
        x.error += round_.stored * std::fabs(x.value) + round_.tiny;
      }
    }
  }

 private:
  // One query's weights, of each key.
  struct Row {
    std::vector<double> score, score_error;
    std::vector<Bounded> p;  // errors are relative
    Bounded lse;
    bool is_padding, sees_none;
  };

  int64_t Query(int64_t b, int64_t h, int64_t i) const {
    return ((b * a_.q_len + i) * a_.heads + h) * a_.head_dim;
  }
  int64_t Key(int64_t b, int64_t h, int64_t j) const {
    return ((b * a_.kv_len + j) * a_.kv_heads + h / a_.group()) * a_.head_dim;
  }

  bool Allowed(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t* s = a_.mask_strides;
    if (a_.mask && !a_.mask[b * s[0] + h * s[1] + i * s[2] + j * s[3]]) return false;
    if (a_.q_lengths && i >= a_.q_lengths[b]) return false;
    if (a_.kv_lengths && j >= a_.kv_lengths[b]) return false;
    return j >= i - a_.left && j <= i + a_.right && (!a_.causal || j <= i);
  }

  // The product of two rows of head_dim elements; its error is that of the sum.
  Bounded Dot(const Array& x, int64_t xi, const Array& y, int64_t yi) const {
    Bounded dot;
    for (int64_t d = 0; d < a_.head_dim; ++d) {
      dot.value += x[xi + d] * y[yi + d];
      dot.error += in_dim_ * std::fabs(x[xi + d] * y[yi + d]);
    }
    return dot;
  }

  Row WeightsOf(int64_t b, int64_t h, int64_t i) const {
    Row row;
    row.score.assign(a_.kv_len, -INFINITY);
    row.score_error.resize(a_.kv_len);
    row.p.resize(a_.kv_len);
    row.is_padding = a_.q_lengths && i >= a_.q_lengths[b];
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < a_.kv_len; ++j) {
      if (!Allowed(b, h, i, j)) continue;
      const Bounded dot = Dot(q_, Query(b, h, i), k_, Key(b, h, j));
      row.score[j] = a_.scale * dot.value;
      row.score_error[j] = std::fabs(a_.scale) * dot.error;
      if (a_.bias) {
        const int64_t* s = a_.bias_strides;
        const double bias = bias_[b * s[0] + h * s[1] + i * s[2] + j * s[3]];
        row.score[j] += bias;
        row.score_error[j] += in_dim_ * std::fabs(bias);
      }
      most = std::max(most, row.score[j]);
    }
    row.sees_none = most == -INFINITY;
    for (const double s : row.score) sum += std::exp(s - most);
    row.lse.value = most + std::log(sum);
    for (int64_t j = 0; j < a_.kv_len; ++j) {
      Bounded& p = row.p[j];
      if (row.sees_none) {
        p = {row.is_padding ? 0 : 1.0 / a_.kv_len, in_keys_};
      } else if (row.score[j] != -INFINITY) {
        p = {std::exp(row.score[j] - most) / sum,
             row.score_error[j] + kRoundoff * (most - row.score[j]) + round_.exponential};
        if (row.lse.value - row.score[j] > kDeepest) p.error = 1;
      }
      row.lse.error += p.value * p.error;
    }
    row.lse.error += in_keys_ + 4 * kRoundoff * (std::fabs(most) + std::log(sum));
    return row;
  }

  void AddQuery(int64_t b, int64_t h, int64_t i) {
    const Row row = WeightsOf(b, h, i);
    lse[(b * a_.heads + h) * a_.q_len + i] =
        row.sees_none ? Bounded{-INFINITY, 0} : row.lse;
    const int64_t qi = Query(b, h, i);
    for (int64_t d = 0; d < a_.head_dim; ++d) {
      Bounded& o = out[qi + d];
      for (int64_t j = 0; j < a_.kv_len; ++j) o.value += Value(row, b, h, j, d);
      for (int64_t j = 0; j < a_.kv_len; ++j) {
        const double error = row.p[j].error, term = Value(row, b, h, j, d);
        o.error += (error + round_.narrow + in_keys_) * std::fabs(term) +
                   error * row.p[j].value * std::fabs(o.value);
      }
    }
    if (!a_.bias && !row.is_padding) AddGradient(row, b, h, i);
  }

  // What key j gives to column d of the output.
  double Value(const Row& row, int64_t b, int64_t h, int64_t j, int64_t d) const {
    return row.p[j].value * v_[Key(b, h, j) + d];
  }

  void AddGradient(const Row& row, int64_t b, int64_t h, int64_t i) {
    const int64_t qi = Query(b, h, i);
    Bounded delta;  // of the output as it was stored
    for (int64_t d = 0; d < a_.head_dim; ++d) {
      const Bounded& o = out[qi + d];
      const double stored = round_.stored * std::fabs(o.value) + round_.tiny;
      delta.value += dout_[qi + d] * o.value;
      delta.error += std::fabs(dout_[qi + d]) *
                     (o.error + stored + in_dim_ * std::fabs(o.value));
    }
    for (int64_t j = 0; j < a_.kv_len; ++j) {
      const double p = row.p[j].value;
      if (p == 0) continue;
      const int64_t kj = Key(b, h, j);
      double p_error = row.p[j].error;  // its weight is e^(s - lse) now
      Bounded ds;                       // of the score, unscaled
      if (!row.sees_none) {
        p_error += row.lse.error + kRoundoff * (3 * std::fabs(row.lse.value) +
                                                std::fabs(row.score[j] - row.lse.value));
        const Bounded dp = Dot(dout_, qi, v_, kj);
        ds.value = p * (dp.value - delta.value);
        ds.error = p * (p_error * std::fabs(dp.value - delta.value) + dp.error +
                        delta.error + 2 * kRoundoff * std::fabs(delta.value)) +
                   round_.narrow * std::fabs(ds.value);
      }
      for (int64_t d = 0; d < a_.head_dim; ++d) {
        AddProduct(ds, in_keys_, a_.scale * k_[kj + d], &dq[qi + d]);
        AddProduct(ds, in_queries_, a_.scale * q_[qi + d], &dk[kj + d]);
        AddProduct({p, (p_error + round_.narrow) * p}, in_queries_, dout_[qi + d],
                   &dv[kj + d]);
      }
    }
  }

  static void AddProduct(const Bounded& x, double in_sum, double y, Bounded* sum) {
    sum->value += x.value * y;
    sum->error += (x.error + in_sum * std::fabs(x.value)) * std::fabs(y);
  }

  const AttentionArgs& a_;
  const Array &q_, &k_, &v_, &bias_, &dout_;
  const AttentionRounding round_;
  const double in_dim_, in_keys_, in_queries_;  // of sums over them
};

}  // namespace tracea::cpu

#endif  // TRACEA_TESTS_CPP_ATTENTION_REFERENCE_H_
