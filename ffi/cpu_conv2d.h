// XLA FFI handler of CPU convolutions; see kernels/cpu/calls/conv2d_call.cc.

#ifndef TRACEA_FFI_CPU_CONV2D_H_
#define TRACEA_FFI_CPU_CONV2D_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* tracea_cpu_conv2d_v1(XLA_FFI_CallFrame* call_frame);

#endif  // TRACEA_FFI_CPU_CONV2D_H_
