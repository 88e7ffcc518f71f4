// XLA FFI handler of functions of each element; kernels/cpu/calls/elementwise_call.cc has
// its contract.

#include "cpu_elementwise.h"

#include "calls/elementwise_call.h"
#include "cpu_call.h"

namespace tracea {
namespace {

// XLA allocates each result anew, which would cost more than to compute it.
void Run(Pool& pool, const ElementwiseOptions& options, Arrays operands, Arrays results) {
  cpu::KeepFreedMemory();
  RunElementwise(pool, options, operands, results);
}

}  // namespace
}  // namespace tracea

TRACEA_CPU_HANDLER(tracea_cpu_elementwise_v1, tracea::ParseElementwise, tracea::Run);
