// A kernel with its launch, and what launching it takes: loading it into a context, encoding
// tensor maps for today's addresses, cuLaunchKernelEx. Nothing here knows who calls: XLA's
// handler (cuda_launch.h) and libtracea (kernels/capi) launch by the same functions.
#pragma once

#include <array>
#include <atomic>
#include <string>

#include "cubin_registry.h"
#include "cuda_driver.h"
#include "cuda_module.h"
#include "launch_spec.h"

namespace tracea::cuda {

// All devices of a program share it and run concurrently.
struct LaunchPlan {
  std::string key;
  std::string entry;
  std::string arch;
  Image image;
  LaunchSpec spec;
  // What LoadKernel answered, by device; devices beyond the array ask it every time.
  std::array<std::atomic<const LoadedKernel*>, 32> loaded{};
};

// Device addresses, as the plan's parameters number them.
using Operands = std::array<void*, kMaxOperands>;

// The plan's kernel in the scope's context. Costs one atomic read once it is loaded.
ffi::Error Loaded(const Driver& driver, const ContextScope& scope, LaunchPlan* plan,
                  const LoadedKernel** kernel);

// Queues one launch; nothing is allocated or waited for.
ffi::Error Launch(const Driver& driver, const LoadedKernel& kernel, const LaunchPlan& plan,
                  const Operands& operands, Stream stream);

}  // namespace tracea::cuda
