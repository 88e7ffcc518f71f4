// XLA FFI handler of the CPU matrix product; see kernels/cpu/calls/gemm_call.cc.

#ifndef TRACEA_FFI_CPU_GEMM_H_
#define TRACEA_FFI_CPU_GEMM_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* tracea_cpu_gemm_v1(XLA_FFI_CallFrame* call_frame);

namespace tracea {

// The best instruction set that this build has kernels for and that the processor and
// the operating system support: one of kIsaNames.
const char* SupportedCpuIsa();

}  // namespace tracea

#endif  // TRACEA_FFI_CPU_GEMM_H_
