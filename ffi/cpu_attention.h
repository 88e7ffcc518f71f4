// XLA FFI handlers of attention on the CPU and of its gradient; see
// kernels/cpu/calls/attention_call.cc.

#ifndef TRACEA_FFI_CPU_ATTENTION_H_
#define TRACEA_FFI_CPU_ATTENTION_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* tracea_cpu_attention_v1(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* tracea_cpu_attention_gradient_v1(XLA_FFI_CallFrame* call_frame);

#endif  // TRACEA_FFI_CPU_ATTENTION_H_
