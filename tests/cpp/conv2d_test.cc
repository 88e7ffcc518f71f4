// Checks the CPU convolutions without jaxlib: every instruction set of this machine, all
// directions, dtypes and epilogues, awkward and random geometry, against a double
// reference; that splitting and threads do not change a bit of the result; and, with
// AddressSanitizer, that no kernel leaves the workspace that it reports.
//
//   g++ -std=c++17 -O2 -I kernels/cpu tests/cpp/conv2d_test.cc <kernels/cpu objects>
//       -pthread

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "arrays.h"
#include "conv2d/conv2d.h"
#include "tasks.h"

using namespace tracea::cpu;

namespace {

// kWide: lines of many windows, of which kernels read several from one copy of the image.
// kTall: as many rows as have partial sums at a time, from copies with as many windows
// beside them as there may be.
// kPointwise: the gradient of the weights of one tap, in one group a plain product.
// kRandom: of any proportions.
enum class Size { kSmall, kLarge, kWide, kTall, kPointwise, kRandom };

struct Case {
  ConvArgs args{};
  Array x, w, y, bias, residual, preactivation;

  explicit Case(Size size) {
    const bool large = size == Size::kLarge, wide = size == Size::kWide;
    ConvArgs& a = args;
    a.direction = static_cast<ConvDirection>(rng() % 3);
    const auto type = [] { return static_cast<DType>(rng() % 3); };
    a.in_type = wide ? DType::kBF16 : type();
    a.out_type = type();
    a.bias_type = type();
    a.residual_type = type();
    a.batch = Pick({0, 1, 1, 2, 3});
    a.groups = wide ? Pick({1, 1, 1, 2}) : Pick({1, 1, 1, 2, 5});
    const bool depthwise = rng() % 6 == 0;
    int64_t inputs =
        depthwise ? 1
        : large   ? Pick({32, 64, 40})
        : wide    ? Pick({3, 10, 32, 64})
                  : Pick({0, 1, 3, 5, 16, 17, 32});
    const int64_t outputs =
        depthwise ? 1
        : large   ? Pick({33, 64, 70})
        : wide    ? Pick({8, 32, 64})
                  : Pick({0, 1, 4, 15, 17, 33});
    if (depthwise) a.groups = Pick({2, 16, 19, 37});
    a.channels = a.groups * inputs;
    a.columns = a.groups * outputs;
    a.height = Extent(large ? Pick({9, 18, 34}) : Pick({1, 2, 5, 8, 13}));
    a.width = Extent(large  ? Pick({9, 18, 34})
                     : wide ? Pick({17, 30, 45})
                            : Pick({1, 2, 5, 8, 13}));
    if (size == Size::kTall) {
      a.direction = ConvDirection::kForward;
      a.in_type = DType::kBF16;
      a.batch = a.groups = 1;
      a.channels = a.columns = inputs = 32;
      a.height = {700, 1, 700, 1, 1, 0};
      a.width = {12, 5, 12, 1, 6, 12};
    }
    if (size == Size::kPointwise) {
      a.direction = ConvDirection::kWeightGrad;
      a.height = Pointwise(a.height.x);
      a.width = Pointwise(a.width.x);
    }
    if (size == Size::kRandom) {
      do {
        a.groups = PickSpread(1, 8);
        inputs = depthwise ? 1 : PickSpread(1, 100);
        a.channels = a.groups * inputs;
        a.columns = depthwise ? a.groups : a.groups * PickSpread(1, 100);
        a.batch = PickSpread(1, 4);
        a.height = RandomExtent();
        a.width = RandomExtent();
      } while (Products() > 400000);
    }
    const int64_t pixels = a.height.x * a.width.x, windows = a.height.y * a.width.y;
    x.Fill(a.in_type, a.batch * pixels * a.channels);
    w.Fill(a.in_type, a.height.w * a.width.w * inputs * a.columns);
    y.Fill(a.in_type, a.batch * windows * a.columns);
    if (a.direction != ConvDirection::kForward) return;
    a.activation = static_cast<Activation>(rng() % 5);
    if (rng() % 2) {
      bias.Fill(a.bias_type, a.columns);
      a.bias = bias.bytes.data();
    }
    if (rng() % 2) {
      residual.Fill(a.residual_type, a.batch * windows * a.columns);
      a.residual = residual.bytes.data();
    }
    if (rng() % 2) a.preactivation = this;  // set to memory by Run
  }

  int64_t Products() const {
    const ConvArgs& a = args;
    const int64_t windows = a.batch * a.height.y * a.width.y;
    return windows * a.height.w * a.width.w * (a.channels / a.groups) * a.columns;
  }

  static ConvExtent RandomExtent() {
    ConvExtent e{};
    do {
      e.x = PickSpread(1, 80);
      e.w = PickSpread(1, 9);
      e.stride = PickSpread(1, 5);
      e.dilation = PickSpread(1, 4);
      e.padding = int64_t(rng() % 12) - 2;
      const int64_t room = e.x + e.padding + int64_t(rng() % 12) - 2 -
                           ((e.w - 1) * e.dilation + 1);
      e.y = room < 0 ? 0 : room / e.stride + 1;
    } while (e.y == 0);
    return e;
  }

  static ConvExtent Pointwise(int64_t x) { return {x, 1, x, 1, 1, 0}; }

  static ConvExtent Extent(int64_t x) {
    ConvExtent e{};
    e.x = x;
    e.w = Pick({1, 1, 2, 3, 3, 5});
    e.stride = Pick({1, 1, 2, 3});
    e.dilation = Pick({1, 1, 2, 3});
    e.padding = Pick({-1, 0, 1, 1, 2, 4});
    const int64_t after = Pick({-1, 0, 1, 3});
    const int64_t room = e.x + e.padding + after - ((e.w - 1) * e.dilation + 1);
    e.y = room < 0 ? 0 : room / e.stride + 1;
    return e;
  }

  Array& result() {
    return args.direction == ConvDirection::kForward     ? y
           : args.direction == ConvDirection::kInputGrad ? x
                                                         : w;
  }

  void Run(const ConvIsa& isa, const ConvConfig& config, int64_t threads) {
    ConvArgs& a = args;
    Array& out = result();
    out.Poison(a.out_type, out.size);
    const bool forward = a.direction == ConvDirection::kForward;
    a.lhs = a.direction == ConvDirection::kInputGrad ? y.bytes.data() : x.bytes.data();
    a.rhs = a.direction == ConvDirection::kWeightGrad ? y.bytes.data() : w.bytes.data();
    a.out = out.bytes.data();
    if (forward && a.preactivation) {
      preactivation.Poison(a.out_type, out.size);
      a.preactivation = preactivation.bytes.data();
    }
    const ConvPlan plan = PlanConv(isa, a, config, threads);
    RunTasks(plan.num_tasks(), threads, plan.workspace_bytes,
             [&](int64_t task, float* workspace) {
               RunConvTask(plan, a, task, workspace);
             });
  }

  // Visits every product of an element of x and one of w that an element of y sums.
  template <typename Visit>
  void ForEachProduct(const Visit& visit) const {
    const ConvArgs& a = args;
    const int64_t inputs = a.channels / a.groups, outputs = a.columns / a.groups;
    const auto at = [](const ConvExtent& e, int64_t out, int64_t tap) {
      return out * e.stride + tap * e.dilation - e.padding;
    };
    for (int64_t n = 0; n < a.batch; ++n)
      for (int64_t oy = 0; oy < a.height.y; ++oy)
        for (int64_t ox = 0; ox < a.width.y; ++ox)
          for (int64_t r = 0; r < a.height.w; ++r)
            for (int64_t s = 0; s < a.width.w; ++s) {
              const int64_t iy = at(a.height, oy, r), ix = at(a.width, ox, s);
              if (iy < 0 || iy >= a.height.x || ix < 0 || ix >= a.width.x) continue;
              const int64_t in = ((n * a.height.x + iy) * a.width.x + ix) * a.channels;
              const int64_t tap = (r * a.width.w + s) * inputs;
              const int64_t out = ((n * a.height.y + oy) * a.width.y + ox) * a.columns;
              for (int64_t c = 0; c < inputs; ++c)
                for (int64_t j = 0; j < a.columns; ++j) {
                  const int64_t i = in + j / outputs * inputs + c;
                  visit(i, (tap + c) * a.columns + j, out + j);
                }
            }
  }

  // Largest error in units of what is allowed for that element; NaN counts as infinite.
  double Error() {
    static const double ulp[] = {0x1p-23, 0x1p-7, 0x1p-10};
    const ConvArgs& a = args;
    Array& out = result();
    std::vector<double> sums(out.size), magnitudes(out.size);
    ForEachProduct([&](int64_t i, int64_t k, int64_t o) {
      const bool by_x = a.direction == ConvDirection::kInputGrad;
      const bool by_w = a.direction == ConvDirection::kWeightGrad;
      const double product = by_x ? w[k] * y[o] : by_w ? x[i] * y[o] : x[i] * w[k];
      const int64_t to = by_x ? i : by_w ? k : o;
      sums[to] += product;
      magnitudes[to] += std::fabs(product);
    });
    double worst = 0;
    for (int64_t i = 0; i < out.size; ++i) {
      double z = sums[i];
      if (a.bias) z += bias[i % a.columns];
      if (a.residual) z += residual[i];
      const double slack = magnitudes[i] * 0x1p-22 + 5e-7 * (1 + std::fabs(z)) + 0x1p-25;
      const auto check = [&](double got, double want) {
        const double allowed = slack + std::fabs(want) * ulp[int(a.out_type)] * 0.51;
        const double error = std::fabs(got - want) / allowed;
        worst = std::max(worst, std::isnan(error) ? INFINITY : error);
      };
      if (a.preactivation) check(preactivation[i], z);
      check(out[i], Activate(z, a.activation));
    }
    return worst;
  }
};

int Check(const ConvIsa& isa, Size size) {
  Case c(size);
  const bool random = size == Size::kRandom;
  const int64_t kc = size == Size::kTall ? 32
                     : random            ? int64_t(rng() % 300)
                                         : Pick({0, 32, 96});
  const auto nc = [&](int64_t other) {
    return random ? int64_t(rng() % 300) : Pick({0, other});
  };
  const bool plain = PlanConv(isa, c.args, {}, 1).gemm != nullptr;
  if (size == Size::kPointwise && plain != (c.args.groups == 1)) {
    std::printf("%s: not taken for what it is\n", IsaName(isa.isa));
    return 1;
  }
  c.Run(isa, {kc, nc(32), 1}, 1);
  const double error = c.Error();
  const std::vector<uint8_t> first = c.result().bytes;
  bool same = true;
  for (int64_t threads : {2, 8}) {
    c.Run(isa, {kc, nc(64), Pick({1, 2, 5})}, threads);
    same &= first == c.result().bytes;
  }
  if (error <= 1 && same) return 0;
  const ConvArgs& a = c.args;
  std::printf("%s direction=%d batch=%ld channels=%ld columns=%ld groups=%ld in=%d "
              "out=%d",
              IsaName(isa.isa), int(a.direction), long(a.batch), long(a.channels),
              long(a.columns), long(a.groups), int(a.in_type), int(a.out_type));
  for (const ConvExtent& e : {a.height, a.width}) {
    std::printf(" (x=%ld w=%ld y=%ld stride=%ld dilation=%ld padding=%ld)",
                long(e.x), long(e.w), long(e.y), long(e.stride), long(e.dilation),
                long(e.padding));
  }
  std::printf(": %s\n",
              same ? ("error is " + std::to_string(error) + " of the allowed").c_str()
                   : "tasks or threads changed bits");
  return 1;
}

}  // namespace

// The number of cases for each instruction set may be given: emulators are slow.
int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400;
  int failures = 0;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa level = static_cast<Isa>(i);
    const char* name = IsaName(level);
    const ConvIsa* isa = UsableConvIsa(level);
    if (isa->isa != level) {
      std::printf("%s: not on this machine, or nothing of its own\n", name);
      continue;
    }
    for (int i = 0; i < cases; ++i) {
      failures += Check(*isa, i % 10 == 0   ? Size::kLarge
                              : i % 10 == 2 ? Size::kPointwise
                              : i % 4 == 1  ? Size::kWide
                                            : Size::kSmall);
    }
    for (int i = 0; i < cases / 2; ++i) failures += Check(*isa, Size::kRandom);
    failures += Check(*isa, Size::kTall);
    std::printf("%s: checked\n", name);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
