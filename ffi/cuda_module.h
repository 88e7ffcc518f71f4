// Compiled kernels loaded into CUDA contexts, each once per process.
#pragma once

#include <memory>
#include <string>

#include "cubin_registry.h"
#include "cuda_driver.h"
#include "launch_spec.h"

namespace tracea::cuda {

// A module that owns its handle; unloaded only if loading could not be completed.
class LoadedModule {
 public:
  LoadedModule(const Driver& driver, Module module) : driver_(driver), module_(module) {}
  ~LoadedModule() { driver_.module_unload(module_); }
  LoadedModule(const LoadedModule&) = delete;
  LoadedModule& operator=(const LoadedModule&) = delete;

  Module get() const { return module_; }

 private:
  const Driver& driver_;
  Module module_;
};

struct LoadedKernel {
  std::unique_ptr<LoadedModule> module;
  Function function = nullptr;
  Context context = nullptr;
  int smem_limit = 0;  // dynamic shared memory that launches may ask for, bytes
  bool large_cluster = false;
};

// Which kernel, and what its messages say about it.
struct KernelImage {
  const std::string& key;
  const std::string& entry;
  const std::string& arch;
  const Cubin& cubin;
};

// The kernel in the scope's context, loaded if this is the first request and prepared for
// launches of this shape. Thread-safe. Kernels stay loaded: captured graphs may hold them,
// and unloading would synchronise the device.
ffi::Error LoadKernel(const Driver& driver, const ContextScope& scope,
                      const KernelImage& image, const LaunchSpec& spec,
                      const LoadedKernel** kernel);

}  // namespace tracea::cuda
