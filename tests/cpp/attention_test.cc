// Checks CPU attention and its gradient without jaxlib: every instruction set of this
// machine, every dtype, awkward shapes, causal masks, windows, boolean masks, biases,
// lengths and shared heads, against a double reference; and that splitting and threads do
// not change a bit of the results.
//
//   g++ -std=c++17 -O2 -I kernels/cpu tests/cpp/attention_test.cc <kernels/cpu objects>
//       -pthread

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "arrays.h"
#include "attention.h"
#include "parallel.h"

using namespace tracea::cpu;

namespace {

constexpr int kMost = 56;  // of operands, in units of 1/32

// Error relative to what was summed, in units of what rounding allows.
struct Errors {
  double worst = 0, roundoff;

  void Add(double got, double want, double magnitude) {
    const double allowed = roundoff * (std::fabs(want) + magnitude) + 1e-6;
    const double error = std::fabs(got - want) / allowed;
    worst = std::max(worst, std::isnan(error) ? INFINITY : error);
  }
};

struct Case {
  AttentionGradientArgs args{};
  Array q, k, v, out, lse, bias, dout, dq, dk, dv;
  std::vector<uint8_t> mask;
  std::vector<int32_t> q_lengths, kv_lengths;

  int64_t q_size() const {
    const AttentionArgs& a = args.forward;
    return a.batch * a.q_len * a.heads * a.head_dim;
  }
  int64_t k_size() const {
    const AttentionArgs& a = args.forward;
    return a.batch * a.kv_len * a.kv_heads * a.head_dim;
  }

  explicit Case(DType type) {
    AttentionArgs& a = args.forward;
    a.type = type;
    a.batch = Pick({1, 2});
    a.kv_heads = Pick({1, 2});
    a.heads = a.kv_heads * Pick({1, 1, 2, 3});
    a.q_len = Pick({1, 2, 7, 13, 15, 31, 33, 64, 65, 70});
    a.kv_len = Pick({1, 3, 8, 17, 31, 32, 63, 65, 97, 130});
    a.head_dim = Pick({1, 3, 8, 16, 24, 31, 33, 64, 72});
    a.scale = static_cast<float>(Pick({-2, 1, 2, 3})) * 0.25f;
    a.causal = rng() % 3 == 0;
    a.left = a.right = kUnlimited;
    if (rng() % 4 == 0) {
      a.left = int64_t(rng() % 40) - 5;
      a.right = int64_t(rng() % 40) - 5;
    }
    a.q = q.Fill(type, q_size(), kMost);
    a.k = k.Fill(type, k_size(), kMost);
    a.v = v.Fill(type, k_size(), kMost);
    args.dout = dout.Fill(type, q_size(), kMost);
    const int64_t whole[4] = {a.batch, a.heads, a.q_len, a.kv_len};
    if (rng() % 3 == 0) {
      a.bias_type = static_cast<DType>(rng() % 3);
      a.bias = bias.Fill(a.bias_type, Broadcast(whole, a.bias_strides), kMost);
    }
    if (rng() % 3 == 0) {
      mask.resize(Broadcast(whole, a.mask_strides));
      for (uint8_t& allowed : mask) allowed = rng() % 4 != 0;
      a.mask = mask.data();
    }
    if (rng() % 4 == 0) a.q_lengths = Lengths(a.q_len, &q_lengths);
    if (rng() % 4 == 0) a.kv_lengths = Lengths(a.kv_len, &kv_lengths);
  }

  // Size and strides of an array of which some dimensions are broadcast.
  static int64_t Broadcast(const int64_t (&whole)[4], int64_t (&strides)[4]) {
    int64_t size = 1;
    for (int i = 3; i >= 0; --i) {
      const bool has = rng() % 3 != 0;
      strides[i] = has && whole[i] > 1 ? size : 0;
      size *= has ? whole[i] : 1;
    }
    return size;
  }

  const int32_t* Lengths(int64_t longest, std::vector<int32_t>* lengths) {
    for (int64_t b = 0; b < args.forward.batch; ++b) {
      lengths->push_back(int32_t(rng() % (longest + 2)));
    }
    return lengths->data();
  }

  template <typename Body>
  static void ForTasks(int64_t tasks, int64_t threads, int64_t bytes, const Body& body) {
    std::vector<std::thread> helpers;
    ParallelFor(
        tasks, threads, [&](auto work) { helpers.emplace_back(work); },
        [&](int64_t task) {
          float* workspace = ThreadWorkspace(bytes);
          std::memset(workspace, 0xff, bytes);
          body(task, workspace);
        });
    for (std::thread& helper : helpers) helper.join();
  }

  void RunForward(Isa isa, const AttentionConfig& config, int64_t threads) {
    AttentionArgs& a = args.forward;
    a.out = out.Poison(a.type, q_size());
    a.lse = lse.Poison(a.lse_type, a.batch * a.heads * a.q_len);
    const AttentionIsa& kernel = *UsableAttentionIsa(isa, a.type);
    const AttentionPlan plan = PlanAttention(kernel, a, config, threads);
    ForTasks(plan.num_tasks(), threads, plan.workspace_bytes,
             [&](int64_t task, float* workspace) {
               kernel.forward(a, plan.block_kv, plan.range(task), workspace);
             });
  }

  void RunGradient(Isa isa, const AttentionConfig& config, int64_t threads) {
    args.dq = dq.Poison(args.forward.type, q_size());
    args.dk = dk.Poison(args.forward.type, k_size());
    args.dv = dv.Poison(args.forward.type, k_size());
    const AttentionGradientIsa& kernel =
        *UsableAttentionGradientIsa(isa, args.forward.type);
    const AttentionGradientPlan plan =
        PlanAttentionGradient(kernel, args, config, threads);
    const int64_t of_keys = plan.keys.num_tasks();
    ForTasks(plan.num_tasks(), threads, plan.workspace_bytes(),
             [&](int64_t task, float* workspace) {
               if (task < of_keys) {
                 kernel.keys(args, plan.keys.block_kv, plan.keys.range(task), workspace);
               } else {
                 kernel.queries(args, plan.queries.block_kv,
                                plan.queries.range(task - of_keys), workspace);
               }
             });
  }

  bool Allowed(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const AttentionArgs& a = args.forward;
    const int64_t* s = a.mask_strides;
    if (a.mask && !a.mask[b * s[0] + h * s[1] + i * s[2] + j * s[3]]) return false;
    if (a.q_lengths && i >= a.q_lengths[b]) return false;
    if (a.kv_lengths && j >= a.kv_lengths[b]) return false;
    return j >= i - a.left && j <= i + a.right && (!a.causal || j <= i);
  }

  // Errors of the output and, without a bias, of the gradients.
  double Error(double roundoff) const {
    const AttentionArgs& a = args.forward;
    const int64_t dim = a.head_dim;
    Errors errors;
    errors.roundoff = roundoff;
    std::vector<double> want_dk(k_size()), want_dv(k_size());
    std::vector<double> size_dk(k_size()), size_dv(k_size());
    for (int64_t b = 0; b < a.batch; ++b) {
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < a.q_len; ++i) {
          const int64_t qi = ((b * a.q_len + i) * a.heads + h) * dim;
          const auto kj = [&](int64_t j) {
            return ((b * a.kv_len + j) * a.kv_heads + h / a.group()) * dim;
          };
          const bool padding = a.q_lengths && i >= a.q_lengths[b];
          std::vector<double> p(a.kv_len);
          double most = -INFINITY, sum = 0;
          for (int64_t j = 0; j < a.kv_len; ++j) {
            p[j] = 0;
            for (int64_t d = 0; d < dim; ++d) p[j] += q[qi + d] * k[kj(j) + d];
            p[j] *= a.scale;
            const int64_t* s = a.bias_strides;
            if (a.bias) p[j] += bias[b * s[0] + h * s[1] + i * s[2] + j * s[3]];
            if (!Allowed(b, h, i, j)) p[j] = -INFINITY;
            most = std::max(most, p[j]);
          }
          const bool none = most == -INFINITY;
          for (double& x : p) sum += x = none ? 1 : std::exp(x - most);
          for (double& x : p) x /= padding ? INFINITY : sum;
          double delta = 0;
          for (int64_t d = 0; d < dim; ++d) {
            double o = 0, size = 0;
            for (int64_t j = 0; j < a.kv_len; ++j) {
              o += p[j] * v[kj(j) + d];
              size += p[j] * std::fabs(v[kj(j) + d]);
            }
            errors.Add(out[qi + d], o, size);
            delta += dout[qi + d] * o;
          }
          const double got = lse[(b * a.heads + h) * a.q_len + i];
          if (none) {
            errors.Add(got < -2e38 ? 0 : NAN, 0, 0);
          } else {
            errors.Add(got, most + std::log(sum), 1 + std::fabs(most));
          }
          if (a.bias) continue;
          std::vector<double> dqi(dim), size(dim);
          for (int64_t j = 0; j < a.kv_len; ++j) {
            double dp = 0, size_dp = std::fabs(delta);
            for (int64_t d = 0; d < dim; ++d) {
              dp += dout[qi + d] * v[kj(j) + d];
              size_dp += std::fabs(dout[qi + d] * v[kj(j) + d]);
            }
            const double ds = none ? 0 : p[j] * (dp - delta) * a.scale;
            size_dp *= none ? 0 : p[j] * std::fabs(a.scale);
            for (int64_t d = 0; d < dim; ++d) {
              dqi[d] += ds * k[kj(j) + d];
              size[d] += size_dp * std::fabs(k[kj(j) + d]);
              want_dk[kj(j) + d] += ds * q[qi + d];
              size_dk[kj(j) + d] += size_dp * std::fabs(q[qi + d]);
              want_dv[kj(j) + d] += p[j] * dout[qi + d];
              size_dv[kj(j) + d] += p[j] * std::fabs(dout[qi + d]);
            }
          }
          for (int64_t d = 0; d < dim; ++d) errors.Add(dq[qi + d], dqi[d], size[d]);
        }
      }
    }
    for (int64_t i = 0; !a.bias && i < k_size(); ++i) {
      errors.Add(dk[i], want_dk[i], size_dk[i]);
      errors.Add(dv[i], want_dv[i], size_dv[i]);
    }
    return errors.worst;
  }
};

int Check(Isa isa, DType type) {
  static const double roundoffs[] = {4e-6, 0x1p-6, 0x1p-9};
  Case c(type);
  const AttentionArgs& a = c.args.forward;
  const int64_t block = Pick({0, 64, 128});
  c.RunForward(isa, {0, block}, 1);
  if (!a.bias) c.RunGradient(isa, {0, block}, 1);
  const double error = c.Error(roundoffs[int(type)]);
  const auto bits = [&] {
    std::vector<uint8_t> all;
    for (const Array* x : {&c.out, &c.lse, &c.dq, &c.dk, &c.dv}) {
      all.insert(all.end(), x->bytes.begin(), x->bytes.end());
    }
    return all;
  };
  const std::vector<uint8_t> first = bits();
  bool same = true;
  for (int64_t threads : {2, 8}) {
    c.RunForward(isa, {Pick({1, 32, 50}), block}, threads);
    if (!a.bias) c.RunGradient(isa, {Pick({1, 32, 50}), block}, threads);
    same = same && bits() == first;
  }
  if (error <= 1 && same) return 0;
  std::printf("%s dtype=%d batch=%ld q_len=%ld kv_len=%ld heads=%ld/%ld dim=%ld "
              "causal=%d window=%ld,%ld bias=%d mask=%d lengths=%d%d: %s\n",
              IsaName(isa), int(type), long(a.batch), long(a.q_len), long(a.kv_len),
              long(a.heads), long(a.kv_heads), long(a.head_dim), a.causal, long(a.left),
              long(a.right), a.bias != nullptr, a.mask != nullptr, a.q_lengths != nullptr,
              a.kv_lengths != nullptr,
              same ? ("error is " + std::to_string(error) + " of the allowed").c_str()
                   : "tasks or threads changed bits");
  return 1;
}

}  // namespace

int main() {
  rng.seed(11);
  int failures = 0;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (UsableIsa(isa) != isa) {
      std::printf("%s: not on this machine\n", IsaName(isa));
      continue;
    }
    for (int n = 0; n < 240; ++n) failures += Check(isa, static_cast<DType>(n % 3));
    std::printf("%s: checked\n", IsaName(isa));
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
