// XLA FFI handler of functions of each element; kernels/cpu/calls/elementwise_call.cc has
// its contract.

#include "cpu_elementwise.h"

#include "calls/elementwise_call.h"
#include "cpu_call.h"

TRACEA_CPU_HANDLER(tracea_cpu_elementwise_v1, tracea::ParseElementwise,
                   tracea::RunElementwise);
