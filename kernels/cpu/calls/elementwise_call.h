// Calls of elementwise functions; see elementwise_call.cc for their contract.

#ifndef TRACEA_KERNELS_CPU_CALLS_ELEMENTWISE_CALL_H_
#define TRACEA_KERNELS_CPU_CALLS_ELEMENTWISE_CALL_H_

#include <string_view>

#include "calls/call.h"
#include "elementwise/elementwise.h"

namespace tracea {

struct ElementwiseOptions {
  std::string_view function;
  cpu::ScalarSide scalar = cpu::ScalarSide::kNone;
  cpu::Isa isa = cpu::kBestIsa;
  int64_t tasks = 1;         // of each thread
  bool past_caches = false;  // whether results are written past the caches
};

// The options live no longer than the attributes.
ElementwiseOptions ParseElementwise(const Attributes& attrs);

void RunElementwise(Pool& pool, const ElementwiseOptions& options, Arrays operands,
                    Arrays results);

}  // namespace tracea

#endif  // TRACEA_KERNELS_CPU_CALLS_ELEMENTWISE_CALL_H_
