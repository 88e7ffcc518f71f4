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

#include <array>
#include <atomic>
#include <string>

#include "cubin_registry.h"
#include "cuda_module.h"
#include "launch_spec.h"

namespace tracea::cuda {

// The state of one call site. All devices of an executable share it and run concurrently.
struct LaunchPlan {
  static ffi::TypeId id;

  std::string key;
  std::string entry;
  std::string arch;
  Image image;
  LaunchSpec spec;
  // What LoadKernel answered, by device; devices beyond the array ask it every time.
  std::array<std::atomic<const LoadedKernel*>, 32> loaded{};
};

extern const XLA_FFI_TypeInfo kLaunchPlanTypeInfo;

}  // namespace tracea::cuda

extern "C" {
XLA_FFI_Error* tracea_cuda_launch_v1_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_prepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_initialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tracea_cuda_launch_v1_execute(XLA_FFI_CallFrame* call_frame);
}
