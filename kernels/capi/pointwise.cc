#include "pointwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "failure.h"

namespace tracea::capi {
namespace {

constexpr int64_t kChunk = 256;         // elements that are converted at a time
constexpr int64_t kTask = 64 * kChunk;  // and that a thread takes
constexpr size_t kMostOperands = 3;

// ---- elements -----------------------------------------------------------------------

float Widened(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

uint16_t Narrowed(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool IsKnown(ArrayType type) {
  return type == ArrayType::kF32 || type == ArrayType::kF64 ||
         type == ArrayType::kBF16 || type == ArrayType::kPred;
}

template <typename T>
T Load(ArrayType type, const void* data, int64_t i) {
  switch (type) {
    case ArrayType::kF32:
      return static_cast<T>(static_cast<const float*>(data)[i]);
    case ArrayType::kF64:
      return static_cast<T>(static_cast<const double*>(data)[i]);
    case ArrayType::kBF16:
      return static_cast<T>(Widened(static_cast<const uint16_t*>(data)[i]));
    default:
      return static_cast<T>(static_cast<const uint8_t*>(data)[i] != 0);
  }
}

template <typename T>
void Store(ArrayType type, void* data, int64_t i, T x) {
  switch (type) {
    case ArrayType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case ArrayType::kF64:
      static_cast<double*>(data)[i] = static_cast<double>(x);
      break;
    case ArrayType::kBF16:
      static_cast<uint16_t*>(data)[i] = Narrowed(static_cast<float>(x));
      break;
    default:
      static_cast<uint8_t*>(data)[i] = x != 0;
  }
}

// ---- functions ----------------------------------------------------------------------

// NaN if one is, and 0.0 is larger than -0.0.
template <typename T>
T Max(T x, T y) {
  return x > y || x != x || (x == y && !std::signbit(x)) ? x : y;
}
template <typename T>
T Min(T x, T y) {
  return x < y || x != x || (x == y && std::signbit(x)) ? x : y;
}
template <typename T>
T Power(T x, int64_t exponent) {
  T power = 1;
  for (uint64_t n = exponent < 0 ? -static_cast<uint64_t>(exponent) : exponent; n; n >>= 1) {
    if (n & 1) power *= x;
    x *= x;
  }
  return exponent < 0 ? 1 / power : power;
}

// Of a chunk: operands x, y and z, of which a function reads as many as it has.
template <typename T>
using Function = void (*)(const T* x, const T* y, const T* z, int64_t exponent, T* out,
                          int64_t n);

struct Row {
  size_t operands;
  Function<float> of_float;
  Function<double> of_double;
};

template <typename T, typename Formula>
void Loop(const T* x, const T* y, const T* z, int64_t exponent, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Formula::Of(x[i], y[i], z[i], exponent);
}

template <typename Formula>
Row RowOf(size_t operands) {
  return {operands, Loop<float, Formula>, Loop<double, Formula>};
}

#define TRACEA_FORMULA(Name, formula)                                    \
  struct Name {                                                          \
    template <typename T>                                                \
    static T Of(T x, [[maybe_unused]] T y, [[maybe_unused]] T z,         \
                [[maybe_unused]] int64_t exponent) {                     \
      return static_cast<T>(formula);                                    \
    }                                                                    \
  };

TRACEA_FORMULA(ConvertOf, x)
TRACEA_FORMULA(NegOf, -x)
TRACEA_FORMULA(AbsOf, std::abs(x))
TRACEA_FORMULA(SignOf, x > 0 ? 1 : x < 0 ? -1 : x * 0)  // zeros keep theirs
TRACEA_FORMULA(IsFiniteOf, std::isfinite(x))
TRACEA_FORMULA(NotOf, x == 0)
TRACEA_FORMULA(FloorOf, std::floor(x))
TRACEA_FORMULA(CeilOf, std::ceil(x))
TRACEA_FORMULA(RintOf, std::rint(x))
TRACEA_FORMULA(RoundOf, std::round(x))
TRACEA_FORMULA(SquareOf, x * x)
TRACEA_FORMULA(IntegerPowOf, Power(x, exponent))
TRACEA_FORMULA(SqrtOf, std::sqrt(x))
TRACEA_FORMULA(RsqrtOf, 1 / std::sqrt(x))
TRACEA_FORMULA(CbrtOf, std::cbrt(x))
TRACEA_FORMULA(ExpOf, std::exp(x))
TRACEA_FORMULA(Exp2Of, std::exp2(x))
TRACEA_FORMULA(Expm1Of, std::expm1(x))
TRACEA_FORMULA(LogOf, std::log(x))
TRACEA_FORMULA(Log1pOf, std::log1p(x))
TRACEA_FORMULA(LogisticOf, 1 / (1 + std::exp(-x)))
TRACEA_FORMULA(ErfOf, std::erf(x))
TRACEA_FORMULA(ErfcOf, std::erfc(x))
TRACEA_FORMULA(SinOf, std::sin(x))
TRACEA_FORMULA(CosOf, std::cos(x))
TRACEA_FORMULA(TanOf, std::tan(x))
TRACEA_FORMULA(AsinOf, std::asin(x))
TRACEA_FORMULA(AcosOf, std::acos(x))
TRACEA_FORMULA(AtanOf, std::atan(x))
TRACEA_FORMULA(SinhOf, std::sinh(x))
TRACEA_FORMULA(CoshOf, std::cosh(x))
TRACEA_FORMULA(TanhOf, std::tanh(x))
TRACEA_FORMULA(AsinhOf, std::asinh(x))
TRACEA_FORMULA(AcoshOf, std::acosh(x))
TRACEA_FORMULA(AtanhOf, std::atanh(x))
TRACEA_FORMULA(AddOf, x + y)
TRACEA_FORMULA(SubOf, x - y)
TRACEA_FORMULA(MulOf, x * y)
TRACEA_FORMULA(DivOf, x / y)
TRACEA_FORMULA(RemOf, std::fmod(x, y))
TRACEA_FORMULA(PowOf, std::pow(x, y))
TRACEA_FORMULA(Atan2Of, std::atan2(x, y))
TRACEA_FORMULA(MaxOf, Max(x, y))
TRACEA_FORMULA(MinOf, Min(x, y))
TRACEA_FORMULA(GtOf, x > y)
TRACEA_FORMULA(GeOf, x >= y)
TRACEA_FORMULA(LtOf, x < y)
TRACEA_FORMULA(LeOf, x <= y)
TRACEA_FORMULA(EqOf, x == y)
TRACEA_FORMULA(NeOf, x != y)
TRACEA_FORMULA(SelectOf, x != 0 ? z : y)
TRACEA_FORMULA(ClampOf, Min(Max(y, x), z))

#undef TRACEA_FORMULA

const std::map<std::string, Row, std::less<>>& Table() {
  static const auto& table = *new std::map<std::string, Row, std::less<>>{
      {"convert", RowOf<ConvertOf>(1)},
      {"neg", RowOf<NegOf>(1)},
      {"abs", RowOf<AbsOf>(1)},
      {"sign", RowOf<SignOf>(1)},
      {"is_finite", RowOf<IsFiniteOf>(1)},
      {"not", RowOf<NotOf>(1)},
      {"floor", RowOf<FloorOf>(1)},
      {"ceil", RowOf<CeilOf>(1)},
      {"rint", RowOf<RintOf>(1)},
      {"round", RowOf<RoundOf>(1)},
      {"square", RowOf<SquareOf>(1)},
      {"integer_pow", RowOf<IntegerPowOf>(1)},
      {"sqrt", RowOf<SqrtOf>(1)},
      {"rsqrt", RowOf<RsqrtOf>(1)},
      {"cbrt", RowOf<CbrtOf>(1)},
      {"exp", RowOf<ExpOf>(1)},
      {"exp2", RowOf<Exp2Of>(1)},
      {"expm1", RowOf<Expm1Of>(1)},
      {"log", RowOf<LogOf>(1)},
      {"log1p", RowOf<Log1pOf>(1)},
      {"logistic", RowOf<LogisticOf>(1)},
      {"erf", RowOf<ErfOf>(1)},
      {"erfc", RowOf<ErfcOf>(1)},
      {"sin", RowOf<SinOf>(1)},
      {"cos", RowOf<CosOf>(1)},
      {"tan", RowOf<TanOf>(1)},
      {"asin", RowOf<AsinOf>(1)},
      {"acos", RowOf<AcosOf>(1)},
      {"atan", RowOf<AtanOf>(1)},
      {"sinh", RowOf<SinhOf>(1)},
      {"cosh", RowOf<CoshOf>(1)},
      {"tanh", RowOf<TanhOf>(1)},
      {"asinh", RowOf<AsinhOf>(1)},
      {"acosh", RowOf<AcoshOf>(1)},
      {"atanh", RowOf<AtanhOf>(1)},
      {"add", RowOf<AddOf>(2)},
      {"sub", RowOf<SubOf>(2)},
      {"mul", RowOf<MulOf>(2)},
      {"div", RowOf<DivOf>(2)},
      {"rem", RowOf<RemOf>(2)},
      {"pow", RowOf<PowOf>(2)},
      {"atan2", RowOf<Atan2Of>(2)},
      {"max", RowOf<MaxOf>(2)},
      {"min", RowOf<MinOf>(2)},
      {"gt", RowOf<GtOf>(2)},
      {"ge", RowOf<GeOf>(2)},
      {"lt", RowOf<LtOf>(2)},
      {"le", RowOf<LeOf>(2)},
      {"eq", RowOf<EqOf>(2)},
      {"ne", RowOf<NeOf>(2)},
      {"select", RowOf<SelectOf>(3)},
      {"clamp", RowOf<ClampOf>(3)},
  };
  return table;
}

// ---- steps --------------------------------------------------------------------------

void CheckTypes(const Program& program, const Step& step) {
  for (const auto* ids : {&step.reads, &step.writes}) {
    for (size_t id : *ids) {
      if (IsKnown(program.values[id].type)) continue;
      Fail(TRACEA_INVALID, "it has elements of the type ", program.values[id].type);
    }
  }
}

int64_t SizeOf(const Value& value) { return value.bytes() / BytesOf(value.type); }

class Map final : public Action {
 public:
  Map(Pool& pool, const Program& program, const Step& step)
      : pool_(pool), out_(program.values[step.writes.at(0)]), size_(SizeOf(out_)) {
    const std::string& name = step.json["function"].AsText("a function");
    const auto found = Table().find(name);
    if (found == Table().end()) {
      Fail(TRACEA_UNSUPPORTED, "this library has no function '", name, "'");
    }
    row_ = &found->second;
    step.json["exponent"].Get(&exponent_);
    is_double_ = out_.type == ArrayType::kF64;
    for (size_t id : step.reads) {
      const Value& x = program.values[id];
      is_double_ = is_double_ || x.type == ArrayType::kF64;
      operands_.push_back({&x, SizeOf(x), 1});
    }
    const std::vector<int64_t> inners = step.json["inners"].AsInts("the repetitions");
    if (inners.size() != operands_.size()) Fail(TRACEA_INVALID, "it lacks repetitions");
    for (size_t k = 0; k < inners.size(); ++k) {
      operands_[k].inner = inners[k];
      const int64_t size = operands_[k].size;
      if (inners[k] < 1 || (size_ > 0 && (size < 1 || size > size_))) {
        Fail(TRACEA_INVALID, "an operand has ", size, " elements and the result ", size_);
      }
    }
    if (operands_.size() != row_->operands || step.writes.size() != 1) {
      Fail(TRACEA_INVALID, name, " has ", row_->operands, " operands; the step has ",
           operands_.size());
    }
    CheckTypes(program, step);
  }

  void Run(const Addresses& addresses, void*) const override {
    RunTasks(pool_, (size_ + kTask - 1) / kTask, 64, [&](int64_t task, float*) {
      const int64_t begin = task * kTask, end = std::min(size_, begin + kTask);
      if (is_double_) {
        Part<double>(addresses, row_->of_double, begin, end);
      } else {
        Part<float>(addresses, row_->of_float, begin, end);
      }
    });
  }

 private:
  template <typename T>
  void Part(const Addresses& addresses, Function<T> function, int64_t begin,
            int64_t end) const {
    T of[kMostOperands][kChunk] = {}, out[kChunk];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t n = std::min(kChunk, end - i);
      for (size_t k = 0; k < operands_.size(); ++k) {
        Read(operands_[k], addresses, i, n, of[k]);
      }
      function(of[0], of[1], of[2], exponent_, out, n);
      void* data = addresses.of(out_);
      for (int64_t j = 0; j < n; ++j) Store(out_.type, data, i + j, out[j]);
    }
  }

  // Element i of the result takes element (i / inner) % size of the operand.
  struct Operand {
    const Value* value;
    int64_t size, inner;
  };

  template <typename T>
  void Read(const Operand& operand, const Addresses& addresses, int64_t begin, int64_t n,
            T* out) const {
    const void* data = addresses.of(*operand.value);
    const ArrayType type = operand.value->type;
    if (operand.size == size_) {
      for (int64_t j = 0; j < n; ++j) out[j] = Load<T>(type, data, begin + j);
      return;
    }
    int64_t times = begin % operand.inner, place = begin / operand.inner % operand.size;
    for (int64_t j = 0; j < n; ++j) {
      out[j] = Load<T>(type, data, place);
      if (++times < operand.inner) continue;
      times = 0;
      if (++place == operand.size) place = 0;
    }
  }

  Pool& pool_;
  const Value& out_;
  int64_t size_;
  const Row* row_;
  int64_t exponent_ = 0;
  bool is_double_;
  std::vector<Operand> operands_;
};

class Reduce final : public Action {
 public:
  Reduce(Pool& pool, const Program& program, const Step& step)
      : pool_(pool),
        x_(program.values[step.reads.at(0)]),
        out_(program.values[step.writes.at(0)]),
        outer_(step.json["outer"].AsInt("a size")),
        reduced_(step.json["reduced"].AsInt("a size")),
        inner_(step.json["inner"].AsInt("a size")) {
    const std::string& name = step.json["function"].AsText("a function");
    is_sum_ = name == "sum";
    is_max_ = name == "max";
    if (!is_sum_ && !is_max_ && name != "min") {
      Fail(TRACEA_UNSUPPORTED, "this library has no reduction '", name, "'");
    }
    // By division: the product of sizes that only a manifest names may overflow.
    const int64_t results = SizeOf(out_), elements = SizeOf(x_);
    const auto is_product = [](int64_t a, int64_t b, int64_t product) {
      return product % a == 0 && product / a == b;
    };
    const bool is_right = outer_ > 0 && reduced_ > 0 && inner_ > 0 && results > 0 &&
                          is_product(outer_, inner_, results) &&
                          is_product(results, reduced_, elements);
    if (!is_right) Fail(TRACEA_INVALID, "it reduces other arrays than it can");
    CheckTypes(program, step);
  }

  // Results side by side are reduced together: their elements lie in memory like that.
  void Run(const Addresses& addresses, void*) const override {
    const void* x = addresses.of(x_);
    void* out = addresses.of(out_);
    if (inner_ == 1) {
      return RunTasks(pool_, outer_, 64, [&](int64_t i, float*) {
        Store(out_.type, out, i, Folded(x, i * reduced_));
      });
    }
    const int64_t parts = (inner_ + kChunk - 1) / kChunk;
    RunTasks(pool_, outer_ * parts, 64, [&](int64_t task, float*) {
      const int64_t i = task / parts, first = task % parts * kChunk;
      const int64_t n = std::min(kChunk, inner_ - first);
      double totals[kChunk], next[kChunk];
      Row(x, i * reduced_ * inner_ + first, n, totals);
      for (int64_t j = 1; j < reduced_; ++j) {
        Row(x, (i * reduced_ + j) * inner_ + first, n, next);
        Join(next, n, totals);
      }
      for (int64_t k = 0; k < n; ++k) {
        Store(out_.type, out, i * inner_ + first + k, totals[k]);
      }
    });
  }

 private:
  double Folded(const void* x, int64_t begin) const {
    double total = Load<double>(x_.type, x, begin);
    for (int64_t j = 1; j < reduced_; ++j) {
      const auto next = Load<double>(x_.type, x, begin + j);
      total = is_sum_ ? total + next : is_max_ ? Max(total, next) : Min(total, next);
    }
    return total;
  }

  void Row(const void* x, int64_t begin, int64_t n, double* to) const {
    for (int64_t k = 0; k < n; ++k) to[k] = Load<double>(x_.type, x, begin + k);
  }

  void Join(const double* next, int64_t n, double* totals) const {
    if (is_sum_) {
      for (int64_t k = 0; k < n; ++k) totals[k] += next[k];
    } else if (is_max_) {
      for (int64_t k = 0; k < n; ++k) totals[k] = Max(totals[k], next[k]);
    } else {
      for (int64_t k = 0; k < n; ++k) totals[k] = Min(totals[k], next[k]);
    }
  }

  Pool& pool_;
  const Value& x_;
  const Value& out_;
  int64_t outer_, reduced_, inner_;
  bool is_sum_, is_max_;
};

}  // namespace

std::unique_ptr<Action> MakeMap(Pool& pool, const Program& program, const Step& step) {
  return std::make_unique<Map>(pool, program, step);
}

std::unique_ptr<Action> MakeReduce(Pool& pool, const Program& program, const Step& step) {
  if (step.reads.size() != 1 || step.writes.size() != 1) {
    Fail(TRACEA_INVALID, "a reduction has one operand and one result");
  }
  return std::make_unique<Reduce>(pool, program, step);
}

}  // namespace tracea::capi
