// Checks CPU attention and its gradient without jaxlib: every instruction set of this
// machine, every dtype, awkward and random shapes, causal masks, windows, boolean masks,
// biases, lengths and shared heads, against a double reference with bounds of what rounding
// may do; that scores which are not finite, or overflow in base 2, stay in their row and are
// NaN there only if they are not finite; that splitting and threads do not change a bit of the results; and, with
// AddressSanitizer, that no kernel leaves the workspace that it reports.
//
//   g++ -std=c++17 -O2 -I kernels/cpu tests/cpp/attention_test.cc <kernels/cpu objects>
//       -pthread

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "arrays.h"
#include "attention/attention.h"
#include "attention_reference.h"
#include "tasks.h"

using namespace tracea::cpu;

namespace {

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

  Case(DType type, bool random) {
    AttentionArgs& a = args.forward;
    a.type = type;
    a.batch = Pick({1, 2});
    a.kv_heads = Pick({1, 2});
    a.heads = a.kv_heads * Pick({1, 1, 2, 3});
    a.q_len = Pick({1, 2, 7, 13, 15, 31, 33, 64, 65, 70});
    a.kv_len = Pick({1, 3, 8, 17, 31, 32, 63, 65, 97, 130});
    a.head_dim = Pick({1, 3, 8, 16, 24, 31, 33, 64, 72});
    while (random) {
      a.kv_heads = PickSpread(1, 4);
      a.heads = a.kv_heads * PickSpread(1, 6);
      a.q_len = PickSpread(1, 1000);
      a.kv_len = PickSpread(1, 1000);
      a.head_dim = PickSpread(1, kMaxHeadDim);
      if (a.batch * a.heads * a.q_len * a.kv_len * a.head_dim < 300000) break;
    }
    a.scale = static_cast<float>(Pick({-2, 1, 2, 3})) * 0.25f;
    a.causal = rng() % 3 == 0;
    a.left = a.right = kUnlimited;
    if (rng() % 4 == 0) {
      a.left = int64_t(rng() % 40) - 5;
      a.right = int64_t(rng() % 40) - 5;
    }
    // From scores near zero to such that single keys get all weight.
    const int most = static_cast<int>(Pick({4, 32, 64, 128}));
    a.q = q.Fill(type, q_size(), most);
    a.k = k.Fill(type, k_size(), most);
    a.v = v.Fill(type, k_size(), most);
    args.dout = dout.Fill(type, q_size(), most);
    const int64_t whole[4] = {a.batch, a.heads, a.q_len, a.kv_len};
    if (rng() % 3 == 0) {
      a.bias_type = static_cast<DType>(rng() % 3);
      a.bias = bias.Fill(a.bias_type, Broadcast(whole, a.bias_strides), most);
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

  void RunForward(Isa isa, const AttentionConfig& config, int64_t threads) {
    AttentionArgs& a = args.forward;
    a.out = out.Poison(a.type, q_size());
    a.lse = lse.Poison(a.lse_type, a.batch * a.heads * a.q_len);
    const AttentionIsa& kernel = *UsableAttentionIsa(isa, a.type);
    const AttentionPlan plan = PlanAttention(kernel, a, config, threads);
    RunTasks(plan.num_tasks(), threads, plan.workspace_bytes,
             [&](int64_t task, float* workspace) {
               kernel.forward.run(a, plan.block_kv, plan.range(task), workspace);
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
    RunTasks(plan.num_tasks(), threads, plan.workspace_bytes,
             [&](int64_t task, float* workspace) {
               RunTask(kernel, args, plan, task, workspace);
             });
  }

  // The largest error, relative to what rounding allows. The gradients are those of a
  // problem without a bias.
  double Error() const {
    const AttentionArgs& a = args.forward;
    const AttentionReference want(a, q, k, v, bias, dout);
    double worst = Worst(out, want.out);
    for (size_t i = 0; i < want.lse.size(); ++i) {
      const bool sees_none = want.lse[i].value == -INFINITY;
      const bool is_right = sees_none && lse[i] < -2e38;
      worst = std::max(worst, sees_none ? (is_right ? 0 : INFINITY)
                                        : Relative(lse[i], want.lse[i]));
    }
    if (a.bias) return worst;
    return std::max({worst, Worst(dq, want.dq), Worst(dk, want.dk), Worst(dv, want.dv)});
  }

  static double Worst(const Array& got, const std::vector<Bounded>& want) {
    double worst = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      worst = std::max(worst, Relative(got[i], want[i]));
    }
    return worst;
  }

  static double Relative(double got, const Bounded& want) {
    const double error = std::fabs(got - want.value) / want.error;
    return std::isnan(error) ? INFINITY : error;
  }
};

int Check(Isa isa, DType type, bool random) {
  Case c(type, random);
  const AttentionArgs& a = c.args.forward;
  const int64_t block = random ? PickSpread(1, 1100) : Pick({0, 64, 128});
  const int64_t passes = Pick({1, 2});
  c.RunForward(isa, {0, block, passes}, 1);
  if (!a.bias) c.RunGradient(isa, {0, block, passes}, 1);
  const double error = c.Error();
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
    c.RunForward(isa, {Pick({1, 32, 50}), block, passes}, threads);
    if (!a.bias) c.RunGradient(isa, {Pick({1, 32, 50}), block, passes}, threads);
    same = same && bits() == first;
  }
  if (error <= 1 && same) return 0;
  std::printf("%s dtype=%d batch=%ld q_len=%ld kv_len=%ld heads=%ld/%ld dim=%ld "
              "causal=%d window=%ld,%ld bias=%d mask=%d lengths=%d%d passes=%ld: %s\n",
              IsaName(isa), int(type), long(a.batch), long(a.q_len), long(a.kv_len),
              long(a.heads), long(a.kv_heads), long(a.head_dim), a.causal, long(a.left),
              long(a.right), a.bias != nullptr, a.mask != nullptr, a.q_lengths != nullptr,
              a.kv_lengths != nullptr, long(passes),
              same ? ("error is " + std::to_string(error) + " of the allowed").c_str()
                   : "tasks or threads changed bits");
  return 1;
}

// All scores of query 0 of head 0 become `value` or half of it, or their negatives.
int CheckSpecial(Isa isa, DType type, float value) {
  Case c(type, false);
  AttentionArgs& a = c.args.forward;
  a.scale = a.scale < 0 ? -1 : 1;
  const int64_t passes = Pick({1, 2}), dim = a.head_dim;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t j = 0; j < a.kv_len; ++j) {
      const double factor = rng() % 2 ? 1 : 0.5;
      Encode(c.k.bytes.data(), type, (b * a.kv_len + j) * a.kv_heads * dim, factor);
    }
  }
  const auto run = [&](float first) {
    for (int64_t d = 0; d < dim; ++d) Encode(c.q.bytes.data(), type, d, d ? 0 : first);
    c.RunForward(isa, {Pick({1, 32, 50}), 64, passes}, 1);
    if (!a.bias) c.RunGradient(isa, {Pick({1, 32, 50}), 64, passes}, 1);
    return std::vector<std::vector<uint8_t>>{c.out.bytes, c.dq.bytes};
  };
  const auto usual = run(1);
  const bool sees_none = c.lse[0] < -2e38;
  const auto special = run(value);
  const size_t row = size_t(dim * ItemSize(type));
  bool is_right = true;
  for (int which = 0; which < (a.bias ? 1 : 2); ++which) {
    const std::vector<uint8_t> &x = usual[which], &y = special[which];
    is_right = is_right && std::equal(x.begin() + row, x.end(), y.begin() + row);
    for (int64_t d = 0; d < dim; ++d) {
      const double found = Decode(y.data(), type, d);
      const bool is_nan = !std::isfinite(value) && !sees_none;
      is_right = is_right && (is_nan ? std::isnan(found) : std::isfinite(found));
    }
  }
  if (is_right) return 0;
  std::printf("%s dtype=%d scores of %g: another row, or what is finite, differs\n",
              IsaName(isa), int(type), double(value));
  return 1;
}

}  // namespace

int main() {
  rng.seed(11);
  int failures = 0;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    const AttentionIsa* own = UsableAttentionIsa(isa, DType::kBF16);
    if (own->isa != isa) {
      std::printf("%s: not on this machine, or nothing of its own\n", IsaName(isa));
      continue;
    }
    for (int n = 0; n < 240; ++n) failures += Check(isa, static_cast<DType>(n % 3), false);
    for (int n = 0; n < 200; ++n) failures += Check(isa, static_cast<DType>(n % 3), true);
    for (int n = 0; n < 60; ++n) {
      const float values[] = {INFINITY, -INFINITY, NAN, 2.4e38f, -2.4e38f, 3e38f};
      const DType type = n / 6 % 2 ? DType::kBF16 : DType::kF32;
      failures += CheckSpecial(isa, type, values[n % 6]);
    }
    std::printf("%s: checked\n", IsaName(isa));
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
