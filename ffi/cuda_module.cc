#include "cuda_module.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

namespace tracea::cuda {
namespace {

// The content of the image, not the key that a program gives it, and the entry.
using CacheKey = std::tuple<std::string, std::string, Context>;

std::string Describe(const KernelImage& image, Device device) {
  return "kernel " + image.entry + " (compiled for " + image.arch + ", image of " +
         std::to_string(image.cubin.bytes.size()) + " bytes, key " + image.key +
         ") on device " + std::to_string(device);
}

// Whether code for `arch` runs on compute capability major.minor: "sm_90a" on 9.0 only,
// "sm_100f" on 10.x from 10.0, "sm_80" on 8.x from 8.0.
bool RunsOn(const std::string& arch, int major, int minor) {
  if (arch.rfind("sm_", 0) != 0) return false;
  char* suffix = nullptr;
  const long number = std::strtol(arch.c_str() + 3, &suffix, 10);
  if (number / 10 != major) return false;
  return *suffix == 'a' ? number % 10 == minor : number % 10 <= minor;
}

ffi::Error CheckArch(const Driver& driver, Device device, const KernelImage& image) {
  int major = 0, minor = 0;
  TRACEA_RETURN_IF_ERROR(driver.Check(
      driver.device_get_attribute(&major, kAttributeComputeCapabilityMajor, device),
      "cuDeviceGetAttribute"));
  TRACEA_RETURN_IF_ERROR(driver.Check(
      driver.device_get_attribute(&minor, kAttributeComputeCapabilityMinor, device),
      "cuDeviceGetAttribute"));
  if (RunsOn(image.arch, major, minor)) return ffi::Error::Success();
  return FailedPrecondition("Cannot load " + Describe(image, device) +
                            ": the device is sm_" + std::to_string(10 * major + minor) +
                            ". Lower the function again for this device.");
}

// Loads the module and resolves the function now: under lazy loading, the first launch
// would otherwise load it, which is not allowed while a graph is captured.
ffi::Error Load(const Driver& driver, const ContextScope& scope, const KernelImage& image,
                LoadedKernel* kernel) {
  const std::string what = Describe(image, scope.device());
  Module module = nullptr;
  TRACEA_RETURN_IF_ERROR(
      driver.Check(driver.module_load_data(&module, image.cubin.bytes.data()),
                   "cuModuleLoadData for " + what));
  kernel->module = std::make_unique<LoadedModule>(driver, module);
  kernel->context = scope.context();
  TRACEA_RETURN_IF_ERROR(driver.Check(
      driver.module_get_function(&kernel->function, module, image.entry.c_str()),
      "cuModuleGetFunction for " + what));
  if (driver.function_load == nullptr) return ffi::Error::Success();
  return driver.Check(driver.function_load(kernel->function), "cuFuncLoad for " + what);
}

// Raises the function's limits to what the launch needs. They are never lowered: another
// call may share the cubin with a larger launch.
ffi::Error Allow(const Driver& driver, const ContextScope& scope, const KernelImage& image,
                 const LaunchSpec& spec, LoadedKernel* kernel) {
  if (spec.smem_bytes > kernel->smem_limit) {
    TRACEA_RETURN_IF_ERROR(driver.Check(
        driver.function_set_attribute(kernel->function, kFunctionMaxDynamicSharedBytes,
                                      spec.smem_bytes),
        "Allowing " + std::to_string(spec.smem_bytes) +
            " bytes of dynamic shared memory for " + Describe(image, scope.device())));
    kernel->smem_limit = spec.smem_bytes;
  }
  constexpr unsigned kPortableClusterSize = 8;
  if (spec.cluster_size() > kPortableClusterSize && !kernel->large_cluster) {
    TRACEA_RETURN_IF_ERROR(driver.Check(
        driver.function_set_attribute(kernel->function,
                                      kFunctionNonPortableClusterSizeAllowed, 1),
        "Allowing clusters of " + std::to_string(spec.cluster_size()) + " blocks for " +
            Describe(image, scope.device())));
    kernel->large_cluster = true;
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error LoadKernel(const Driver& driver, const ContextScope& scope,
                      const KernelImage& image, const LaunchSpec& spec,
                      const LoadedKernel** kernel) {
  static std::mutex mutex;
  // Never destroyed: the driver may be gone before static destructors run.
  static auto& loaded = *new std::map<CacheKey, std::unique_ptr<LoadedKernel>>();
  std::lock_guard<std::mutex> lock(mutex);
  const CacheKey key{image.cubin.sha256, image.entry, scope.context()};
  std::unique_ptr<LoadedKernel>& slot = loaded[key];
  if (slot == nullptr) {
    auto fresh = std::make_unique<LoadedKernel>();
    TRACEA_RETURN_IF_ERROR(CheckArch(driver, scope.device(), image));
    TRACEA_RETURN_IF_ERROR(Load(driver, scope, image, fresh.get()));
    slot = std::move(fresh);
  }
  TRACEA_RETURN_IF_ERROR(Allow(driver, scope, image, spec, slot.get()));
  *kernel = slot.get();
  return ffi::Error::Success();
}

}  // namespace tracea::cuda
