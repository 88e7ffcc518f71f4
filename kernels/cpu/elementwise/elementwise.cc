#include "elementwise/elementwise.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

#if defined(__SSE2__)
constexpr int64_t kPart = 256;    // elements on their way past the caches
constexpr int64_t kLargest = 16;  // bytes of an element

const char* Advanced(const void* data, int64_t elements, int64_t element_bytes) {
  return static_cast<const char*>(data) + elements * element_bytes;
}

// Copies to memory, past the caches. `to` is a multiple of 16.
void Stream(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
  for (; at + 16 <= bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}

// By parts that stay in the first-level cache until they are copied.
void ComputePastCaches(const Elementwise& f, const void* x, const void* y, char* out,
                       int64_t begin, int64_t end) {
  alignas(64) char part[kPart * kLargest];
  const int64_t of_x = f.scalar == ScalarSide::kLeft ? 0 : ElementBytes(f.own);
  const int64_t of_y = f.scalar == ScalarSide::kRight ? 0 : ElementBytes(f.own);
  const int64_t of_out = ElementBytes(f.out);
  for (int64_t i = begin; i < end; i += kPart) {
    const int64_t count = std::min(kPart, end - i);
    f.run(Advanced(x, i, of_x), y ? Advanced(y, i, of_y) : nullptr, part, 0, count);
    Stream(out + i * of_out, part, count * of_out);
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

ElementwisePlan PlanElementwise(int64_t size, int64_t bytes, int64_t tasks,
                                int64_t threads) {
  const int64_t most = std::max<int64_t>(bytes / kLeastBytes, 1);
  const int64_t wanted = threads <= 1 ? 1 : threads * std::max<int64_t>(tasks, 1);
  const int64_t count = std::max(std::min(most, wanted), bytes / kMostBytes);
  const int64_t step = (size / count + kUnit) / kUnit * kUnit;
  return {size, step};
}

void Compute(const Elementwise& function, const void* x, const void* y, void* out,
             int64_t begin, int64_t end, [[maybe_unused]] bool past_caches) {
  const IeeeArithmetic mode;
#if defined(__SSE2__)
  char* const first = static_cast<char*>(out) + begin * ElementBytes(function.out);
  if (past_caches && reinterpret_cast<uintptr_t>(first) % 16 == 0) {
    return ComputePastCaches(function, x, y, static_cast<char*>(out), begin, end);
  }
#endif
  function.run(x, y, out, begin, end);
}

}  // namespace tracea::cpu
