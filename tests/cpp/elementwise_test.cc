// Checks the elementwise functions without jaxlib: every function, type, scalar and
// instruction set of this machine, at sizes around vectors, cut into tasks or not, against
// plain code; that all instruction sets have the same bits; and that a thread which takes
// subnormal numbers for zero does not while it computes these.

#include "elementwise/elementwise.h"

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__GLIBC__)
#include <sys/resource.h>
#endif

#include "common/ieee.h"
#include "common/memory.h"

using namespace tracea::cpu;

namespace {

std::mt19937 rng(7);
int failures = 0;

void Fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

// Few bits, so that products and their sums are exact; never zero.
template <typename T>
T Random() {
  const auto part = [] { return double(int(rng() % 63) - 31) / 32 + 1.0 / 64; };
  if constexpr (IsComplex<T>::value) {
    return {typename T::value_type(part()), typename T::value_type(part())};
  } else {
    return T(part());
  }
}

template <typename T>
T Expected(const std::string& function, T x, T y) {
  if (function == "add") return x + y;
  if (function == "subtract") return x - y;
  if (function == "multiply") return x * y;
  if (function == "divide") return x / y;
  if (function == "negative") return -x;
  return T(std::abs(x));
}

// What a kernel wrote at `i`, whose results may be real where its operands are complex.
template <typename T>
T Result(const std::vector<uint8_t>& out, bool is_part, int64_t i) {
  if constexpr (IsComplex<T>::value) {
    if (is_part) {
      typename T::value_type part;
      std::memcpy(&part, out.data() + i * sizeof(part), sizeof(part));
      return T(part);
    }
  }
  T value;
  std::memcpy(&value, out.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Check(const std::string& function, ElementType type, ScalarSide scalar,
           int64_t size) {
  std::vector<T> x(scalar == ScalarSide::kLeft ? 1 : size);
  std::vector<T> y(scalar == ScalarSide::kRight ? 1 : size);
  for (T& value : x) value = Random<T>();
  for (T& value : y) value = Random<T>();
  std::vector<uint8_t> first;
  for (int i = 0; i < kIsaCount; ++i) {
    const ElementwiseIsa& isa = UsableElementwiseIsa(static_cast<Isa>(i));
    Elementwise found;
    const std::string what = function + " of type " + std::to_string(int(type)) +
                             ", scalar " + std::to_string(int(scalar)) + ", size " +
                             std::to_string(size) + ", " + IsaName(isa.isa);
    if (!isa.find(function.data(), function.size(), type, scalar, &found)) {
      if (function != "negative" && function != "abs") Fail(what + " is missing");
      return;
    }
    std::vector<uint8_t> out(size * ElementBytes(found.out));
    const ElementwisePlan plan = PlanElementwise(out.data(), size, rng() % 2 << 22, 3, 2);
    for (int64_t task = 0; task < plan.num_tasks(); ++task) {
      Compute(found, x.data(), found.operands == 2 ? y.data() : nullptr, out.data(),
              plan.begin(task), plan.end(task), rng() % 2);
    }
    if (first.empty()) first = out;
    if (first != out) Fail(what + ": other bits than the baseline's");
    const double unit = type == ElementType::kF32 || type == ElementType::kC64 ? 1.2e-7
                                                                               : 2.3e-16;
    const bool is_rounded = function == "divide" || function == "abs";
    for (int64_t j = 0; j < size; ++j) {
      const T wanted = Expected(function, x[x.size() == 1 ? 0 : j],
                                y[y.size() == 1 ? 0 : j]);
      const T got = Result<T>(out, found.out != type, j);
      const double error = std::abs(got - wanted);
      if (!(error <= (is_rounded ? 4 * unit * std::abs(wanted) : 0))) {
        return Fail(what + " is wrong at " + std::to_string(j));
      }
    }
  }
}

void CheckPlan(const ElementwisePlan& plan, int64_t size) {
  int64_t next = 0;
  for (int64_t task = 0; task < plan.num_tasks(); ++task) {
    if (plan.begin(task) != next || plan.end(task) <= next) Fail("a plan has holes");
    next = plan.end(task);
  }
  if (next != size) Fail("a plan ends early");
}

void CheckPlans() {
  for (int64_t size : {0, 1, 63, 64, 65, 1000, 1 << 20}) {
    for (int64_t tasks : {1, 2, 64}) {
      CheckPlan(PlanElementwise(nullptr, size, size * 16, tasks, 3), size);
    }
  }
  for (int64_t size : {(3 << 20) + 1, 5 << 20, (5 << 20) + 77}) {
    for (uintptr_t at : {uintptr_t{64}, uintptr_t{5} << 20, (uintptr_t{6} << 20) - 64}) {
      const auto* out = reinterpret_cast<const void*>(at);
      const ElementwisePlan plan = PlanElementwise(out, size, size * 8, 4, 3);
      CheckPlan(plan, size);
      for (int64_t task = 1; task < plan.num_tasks(); ++task) {
        if ((at + plan.begin(task) * 8) % kHugePage) Fail("two tasks share a huge page");
      }
    }
  }
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
int64_t FaultsOfTouching(int arrays, int64_t bytes) {
  rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  std::vector<char*> held;
  for (int i = 0; i < arrays; ++i) {
    held.push_back(static_cast<char*>(std::malloc(bytes)));
    for (int64_t at = 0; at < bytes; at += 4096) held.back()[at] = 1;
  }
  for (char* array : held) std::free(array);
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

void CheckMemoryIsKept() {
  KeepFreedMemory();
  const int64_t first = FaultsOfTouching(5, 5 << 20), next = FaultsOfTouching(5, 5 << 20);
  if (next > first / 2) Fail("freed memory was given back");
}
#else
void CheckMemoryIsKept() {}
#endif

#if defined(__x86_64__)
void CheckModes() {
  const uint32_t flushing = _mm_getcsr() | 0x8040;
  const uint32_t before = _mm_getcsr();
  volatile float tiny = 1e-40f, half = 0.5f;
  _mm_setcsr(flushing);
  const float flushed = tiny * half;
  float kept;
  {
    const IeeeArithmetic mode;
    kept = tiny * half;
  }
  if (_mm_getcsr() << 26 != flushing << 26) Fail("the thread's mode did not come back");
  _mm_setcsr(before);
  if (flushed != 0 || kept == 0) Fail("subnormal numbers were lost");
}
#else
void CheckModes() {}
#endif

}  // namespace

int main() {
  for (const char* name : {"add", "subtract", "multiply", "divide", "negative", "abs"}) {
    for (auto scalar : {ScalarSide::kNone, ScalarSide::kLeft, ScalarSide::kRight}) {
      for (int64_t size : {1, 2, 3, 7, 8, 9, 33, 64, 1031}) {
        Check<float>(name, ElementType::kF32, scalar, size);
        Check<double>(name, ElementType::kF64, scalar, size);
        Check<std::complex<float>>(name, ElementType::kC64, scalar, size);
        Check<std::complex<double>>(name, ElementType::kC128, scalar, size);
      }
    }
  }
  Elementwise none;
  if (UsableElementwiseIsa(kBestIsa).find("ad", 2, ElementType::kF32, ScalarSide::kNone,
                                          &none)) {
    Fail("there is a function of a part of a name");
  }
  CheckMemoryIsKept();
  CheckPlans();
  CheckModes();
  std::printf(failures ? "%d failures\n" : "elementwise functions: all right\n", failures);
  return failures != 0;
}
