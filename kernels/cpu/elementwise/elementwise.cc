#include "elementwise/elementwise.h"

#include <algorithm>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/ieee.h"
#include "common/ladder.h"
#include "common/memory.h"

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
constexpr int64_t kPagesOfThread = 4;      // huge ones, at least, if they are tasks
constexpr int64_t kUnit = 64;              // elements: tasks share no line of a cache
constexpr int64_t kPart = 4 << 10;         // bytes on their way past the caches
constexpr uintptr_t kStreamed = 32;        // bytes that are stored at once, if aligned

#if defined(__SSE2__)
const char* Advanced(const void* data, int64_t elements, int64_t element_bytes) {
  return static_cast<const char*>(data) + elements * element_bytes;
}

// By parts that stay in the first-level cache until they are copied.
void ComputePastCaches(const Elementwise& f, const void* x, const void* y, char* out,
                       int64_t begin, int64_t end) {
  alignas(64) char part[kPart];
  const int64_t of_x = f.scalar == ScalarSide::kLeft ? 0 : ElementBytes(f.own);
  const int64_t of_y = f.scalar == ScalarSide::kRight ? 0 : ElementBytes(f.own);
  const int64_t of_out = ElementBytes(f.out);
  const int64_t step = kPart / of_out;
  for (int64_t i = begin; i < end; i += step) {
    const int64_t count = std::min(step, end - i);
    f.run(Advanced(x, i, of_x), y ? Advanced(y, i, of_y) : nullptr, part, 0, count);
    f.stream(out + i * of_out, part, count * of_out);
  }
  _mm_sfence();  // other threads see them when the task is done
}
#endif

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

ElementwisePlan PlanElementwise(const void* out, int64_t size, int64_t bytes,
                                int64_t tasks, int64_t threads) {
  if (bytes >= kPagesOfThread * kHugePage * std::max<int64_t>(threads, 1)) {
    const int64_t in_page = reinterpret_cast<uintptr_t>(out) % kHugePage;
    const int64_t element = bytes / size;
    return {size, kHugePage / element, in_page / element};
  }
  const int64_t most = std::max<int64_t>(bytes / kLeastBytes, 1);
  const int64_t wanted = threads <= 1 ? 1 : threads * std::max<int64_t>(tasks, 1);
  const int64_t count = std::max(std::min(most, wanted), bytes / kMostBytes);
  const int64_t step = (size / count + kUnit) / kUnit * kUnit;
  return {size, step, 0};
}

void Compute(const Elementwise& function, const void* x, const void* y, void* out,
             int64_t begin, int64_t end, [[maybe_unused]] bool past_caches) {
  const IeeeArithmetic mode;
#if defined(__SSE2__)
  char* const first = static_cast<char*>(out) + begin * ElementBytes(function.out);
  const bool is_aligned = reinterpret_cast<uintptr_t>(first) % kStreamed == 0;
  if (past_caches && is_aligned && function.stream) {
    return ComputePastCaches(function, x, y, static_cast<char*>(out), begin, end);
  }
#endif
  function.run(x, y, out, begin, end);
}

}  // namespace tracea::cpu
