#include "elementwise/elementwise.h"

#include <algorithm>
#include <cstdint>

#include "common/ieee.h"
#include "common/ladder.h"

namespace tracea::cpu {

extern const ElementwiseIsa kBaselineElementwise;
#if defined(__x86_64__)
extern const ElementwiseIsa kAvx2Elementwise;
#endif

namespace {

// Wider vectors would wait for the memory as well.
constexpr Ladder<ElementwiseIsa> kElementwise = TRACEA_LADDER(
    &kBaselineElementwise, &kAvx2Elementwise, nullptr, nullptr, nullptr, nullptr);

constexpr int64_t kLeastBytes = 64 << 10;  // of a task: below, waking a thread costs more
constexpr int64_t kMostBytes = 256 << 10;  // so that a thread which is late leaves little
constexpr int64_t kUnit = 64;              // elements: tasks share no line of a cache

}  // namespace

const ElementwiseIsa& UsableElementwiseIsa(Isa wanted) {
  return *kElementwise.Best(wanted, [](const ElementwiseIsa&) { return true; });
}

int64_t ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return 4;
    case ElementType::kF64:
    case ElementType::kC64:
      return 8;
    default:
      return 16;
  }
}

ElementwisePlan PlanElementwise(int64_t size, int64_t bytes, int64_t tasks,
                                int64_t threads) {
  const int64_t most = std::max<int64_t>(bytes / kLeastBytes, 1);
  const int64_t wanted = threads <= 1 ? 1 : threads * std::max<int64_t>(tasks, 1);
  const int64_t count = std::max(std::min(most, wanted), bytes / kMostBytes);
  const int64_t step = (size / count + kUnit) / kUnit * kUnit;
  return {size, step};
}

void Compute(const Elementwise& function, const void* x, const void* y, void* out,
             int64_t begin, int64_t end) {
  const IeeeArithmetic mode;
  function.run(x, y, out, begin, end);
}

}  // namespace tracea::cpu
