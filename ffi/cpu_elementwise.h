// XLA FFI handler of elementwise functions; see kernels/cpu/calls/elementwise_call.cc.

#ifndef TRACEA_FFI_CPU_ELEMENTWISE_H_
#define TRACEA_FFI_CPU_ELEMENTWISE_H_

#include "xla/ffi/api/c_api.h"

// Visible: runtime/launch.py finds it in the extension by its name.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* tracea_cpu_elementwise_v1(
    XLA_FFI_CallFrame* call_frame);

#endif  // TRACEA_FFI_CPU_ELEMENTWISE_H_
