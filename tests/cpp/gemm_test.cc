// Checks the CPU matrix product without jaxlib: every instruction set of this machine,
// all layouts, dtypes and epilogues, awkward and random shapes, against a double reference;
// that blocking, splitting and threads do not change a bit of the result; and, with
// AddressSanitizer, that no kernel leaves the workspace that it reports.
//
//   g++ -std=c++17 -O2 -I kernels/cpu tests/cpp/gemm_test.cc <kernels/cpu objects>
//       -pthread

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "arrays.h"
#include "gemm/gemm.h"
#include "tasks.h"

using namespace tracea::cpu;

namespace {

// Wide: the partial sums of bf16 matrices do not fit L2, so that there are several row
// strips. Some have whole steps of k: then AMX uses rows of lhs as they are stored, and
// those of words of two bf16 are packed beside the products. Skinny: few rows or columns
// and several strips of the operand that is streamed, at times several blocks of k. Random:
// of any proportions.
enum class Size { kSmall, kLarge, kWide, kSkinny, kRandom };

struct Case {
  GemmArgs args{};
  Array lhs, rhs, bias, residual, out, preactivation;

  explicit Case(Size size) {
    GemmArgs& a = args;
    const auto dim = [&] {
      return size == Size::kLarge
                 ? Pick({96, 127, 160, 257, 300})
                 : Pick({0, 1, 2, 3, 4, 5, 7, 13, 14, 15, 16, 17, 31, 32, 33, 65, 97});
    };
    const auto type = [] { return static_cast<DType>(rng() % 3); };
    a.m = dim();
    a.n = dim();
    a.k = dim();
    if (size == Size::kWide) {
      a.m = 300;
      a.n = 1030;
      a.k = Pick({64, 70, 96});
    }
    if (size == Size::kSkinny) {
      a.m = Pick({1, 2, 3, 6});
      a.n = Pick({1030, 2070});
      a.k = Pick({9, 70, 1030});
      if (rng() % 2) std::swap(a.m, a.n);
    }
    while (size == Size::kRandom) {
      a.m = PickSpread(1, 2000);
      a.n = PickSpread(1, 2000);
      a.k = PickSpread(1, 2000);
      if (a.m * a.n * a.k < 300000) break;
    }
    a.trans_lhs = rng() % 2;
    a.trans_rhs = rng() % 2;
    a.in_type = size == Size::kWide ? DType::kBF16 : type();
    a.out_type = type();
    a.activation = static_cast<Activation>(rng() % 5);
    a.residual_op = static_cast<ResidualOp>(rng() % 2);
    a.lhs_stride = a.trans_lhs ? a.m : a.k;
    // Rows that share sets of L1.
    if (size == Size::kWide && !a.trans_lhs && rng() % 2) a.lhs_stride = 1024;
    a.rhs_stride = a.trans_rhs ? a.k : a.n;
    a.out_stride = a.residual_stride = a.n;
    a.bias_type = type();
    a.residual_type = type();
    const int64_t lhs_rows = a.trans_lhs ? a.k : a.m;
    if (size == Size::kLarge) {
      lhs.FillSpread(a.in_type, lhs_rows * a.lhs_stride);
      rhs.FillSpread(a.in_type, a.k * a.n);
    } else {
      lhs.Fill(a.in_type, lhs_rows * a.lhs_stride);
      rhs.Fill(a.in_type, a.k * a.n);
    }
    a.lhs = lhs.bytes.data();
    a.rhs = rhs.bytes.data();
    if (rng() % 2) {
      bias.Fill(a.bias_type, a.n);
      a.bias = bias.bytes.data();
    }
    if (rng() % 2) {
      residual.Fill(a.residual_type, a.m * a.n);
      a.residual = residual.bytes.data();
    }
    if (rng() % 2) a.preactivation = this;  // set to memory by Run
  }

  void Run(const GemmIsa& isa, const GemmConfig& config, int64_t threads) {
    GemmArgs& a = args;
    out.Poison(a.out_type, a.m * a.n);
    a.out = out.bytes.data();
    if (a.preactivation) {
      preactivation.Poison(a.out_type, a.m * a.n);
      a.preactivation = preactivation.bytes.data();
    }
    GemmPlan plan = PlanGemm(isa, a, 1, config, threads);
    // Machines differ in it, and results must not.
    if (threads == 8) {
      int64_t& depth = plan.blocks.stream_depth;
      depth = depth == kShallowDepth ? isa.stream_depth : kShallowDepth;
    }
    RunTasks(plan.num_tasks(), threads, plan.workspace_bytes,
             [&](int64_t task, float* workspace) {
               isa.run(a, plan.blocks, plan.Range(task), workspace);
             });
  }

  // Largest error in units of what is allowed for that element; NaN counts as infinite.
  double Error() const {
    static const double ulp[] = {0x1p-23, 0x1p-7, 0x1p-10};
    const GemmArgs& a = args;
    double worst = 0;
    for (int64_t i = 0; i < a.m; ++i) {
      for (int64_t j = 0; j < a.n; ++j) {
        double z = 0, magnitude = 0;
        for (int64_t p = 0; p < a.k; ++p) {
          const double x = lhs[a.trans_lhs ? p * a.lhs_stride + i : i * a.lhs_stride + p] *
                           rhs[a.trans_rhs ? j * a.rhs_stride + p : p * a.rhs_stride + j];
          z += x;
          magnitude += std::fabs(x);
        }
        if (a.bias) z += bias[j];
        double y = Activate(z, a.activation);
        double slack = magnitude * 0x1p-22 + 5e-7 * (1 + std::fabs(z)) + 0x1p-25;
        const auto check = [&](double got, double want) {
          const double allowed = slack + std::fabs(want) * ulp[int(a.out_type)] * 0.51;
          const double error = std::fabs(got - want) / allowed;
          worst = std::max(worst, std::isnan(error) ? INFINITY : error);
        };
        if (a.preactivation) check(preactivation[i * a.n + j], z);
        if (a.residual && a.residual_op == ResidualOp::kMultiply) {
          y *= residual[i * a.n + j];
          slack *= 1 + std::fabs(residual[i * a.n + j]);
        } else if (a.residual) {
          y += residual[i * a.n + j];
        }
        check(out[i * a.n + j], y);
      }
    }
    return worst;
  }
};

int Check(Isa level, Size size) {
  Case c(size);
  const GemmIsa& isa = *UsableGemmIsa(level, c.args);
  const bool random = size == Size::kRandom;
  const int64_t kc = random ? int64_t(rng() % 200) : Pick({0, 16, 40, 100});
  const auto nc = [&](int64_t other) {
    return random ? int64_t(rng() % 300) : Pick({0, other});
  };
  c.Run(isa, {kc, size == Size::kWide ? 1024 : nc(32), 1}, 1);
  const double error = c.Error();
  const std::vector<uint8_t> first = c.out.bytes;
  bool same = true;
  for (const int64_t threads : {2, 8}) {
    c.Run(isa, {kc, nc(64), Pick({1, 2, 5})}, threads);
    same = same && first == c.out.bytes;
  }
  if (error <= 1 && same) return 0;
  const GemmArgs& a = c.args;
  std::printf("%s m=%ld n=%ld k=%ld trans=%d%d in=%d out=%d activation=%d: %s\n",
              IsaName(isa.isa), long(a.m), long(a.n), long(a.k), a.trans_lhs, a.trans_rhs,
              int(a.in_type), int(a.out_type), int(a.activation),
              same ? ("error is " + std::to_string(error) + " of the allowed").c_str()
                   : "tasks or threads changed bits");
  return 1;
}

}  // namespace

int main() {
  int failures = 0;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (UsableIsa(isa) != isa) {
      std::printf("%s: not on this machine\n", IsaName(isa));
      continue;
    }
    for (int i = 0; i < 400; ++i) failures += Check(isa, Size::kSmall);
    for (int i = 0; i < 20; ++i) failures += Check(isa, Size::kLarge);
    for (int i = 0; i < 6; ++i) failures += Check(isa, Size::kWide);
    for (int i = 0; i < 20; ++i) failures += Check(isa, Size::kSkinny);
    for (int i = 0; i < 200; ++i) failures += Check(isa, Size::kRandom);
    std::printf("%s: checked\n", IsaName(isa));
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
