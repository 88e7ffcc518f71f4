// One FFI target that launches any kernel on a GPU.
//
//   instantiate  once per call site: decode the attributes, find the compiled image
//   prepare      load the module, once per device
//   initialize   the same, where prepare was not told the device
//   execute      encode tensor maps for today's addresses, cuLaunchKernelEx
//
// Execute does nothing else, so XLA may record it in a CUDA graph.
//
// Attributes: abi (int64), kernel_key, entry, arch (strings), launch, params (int64 arrays,
// see launch_spec.h), sha256 (of the image; missing in programs of earlier versions, which
// get none from a disk), and optionally cubin (base64 of the image). Operands are the
// arguments, then the results.
#pragma once

#include "launch_plan.h"

namespace tracea::cuda {

// The state of one call site.
struct CallSite {
  static ffi::TypeId id;
  LaunchPlan plan;
};

extern const XLA_FFI_TypeInfo kCallSiteTypeInfo;

}  // namespace tracea::cuda

extern "C" {
XLA_FFI_Error* tracea_cuda_launch_v1_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_prepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_initialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_execute(XLA_FFI_CallFrame* call_frame);
}
