// XLA FFI handler of attention on the CPU; see cpu_attention.cc for its contract.

#ifndef TRACEA_FFI_CPU_ATTENTION_H_
#define TRACEA_FFI_CPU_ATTENTION_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* tracea_cpu_attention_v1(XLA_FFI_CallFrame* call_frame);

#endif  // TRACEA_FFI_CPU_ATTENTION_H_
