#include "cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace tracea::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

struct Opened {
  Driver driver{};
  std::string why_not;  // empty when the driver is usable
};

template <typename Pointer>
bool Find(void* library, const char* name, Pointer* entry) {
  *entry = reinterpret_cast<Pointer>(dlsym(library, name));
  return *entry != nullptr;
}

// Fills in the table; returns the name of the first entry point that is missing.
const char* FindAll(void* library, Driver* d) {
#define TRACEA_FIND(name, entry) \
  if (!Find(library, name, &d->entry)) return name
  TRACEA_FIND("cuInit", init);
  TRACEA_FIND("cuGetErrorName", get_error_name);
  TRACEA_FIND("cuGetErrorString", get_error_string);
  TRACEA_FIND("cuDeviceGet", device_get);
  TRACEA_FIND("cuDeviceGetAttribute", device_get_attribute);
  TRACEA_FIND("cuDevicePrimaryCtxRetain", primary_context_retain);
  TRACEA_FIND("cuCtxGetCurrent", context_get_current);
  TRACEA_FIND("cuCtxGetDevice", context_get_device);
  TRACEA_FIND("cuCtxPushCurrent_v2", context_push);
  TRACEA_FIND("cuCtxPopCurrent_v2", context_pop);
  TRACEA_FIND("cuModuleLoadData", module_load_data);
  TRACEA_FIND("cuModuleUnload", module_unload);
  TRACEA_FIND("cuModuleGetFunction", module_get_function);
  TRACEA_FIND("cuFuncSetAttribute", function_set_attribute);
  TRACEA_FIND("cuLaunchKernelEx", launch);
  TRACEA_FIND("cuTensorMapEncodeTiled", tensor_map_encode_tiled);
#undef TRACEA_FIND
  Find(library, "cuFuncLoad", &d->function_load);
  Find(library, "cuTensorMapEncodeIm2col", &d->tensor_map_encode_im2col);
  return nullptr;
}

Opened Open() {
  Opened opened;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    opened.why_not = std::string("The CUDA driver library cannot be loaded (") +
                     (reason != nullptr ? reason : kLibrary) +
                     "). Install an NVIDIA driver for CUDA 12 or later.";
    return opened;
  }
  if (const char* missing = FindAll(library, &opened.driver)) {
    opened.why_not = std::string("The CUDA driver has no ") + missing +
                     ". Install an NVIDIA driver for CUDA 12 or later.";
    return opened;
  }
  ffi::Error error = opened.driver.Check(opened.driver.init(0), "cuInit");
  if (error.failure()) opened.why_not = error.message();
  return opened;
}

// Primary contexts stay retained for the life of the process, as XLA's own do.
ffi::Error PrimaryContext(const Driver& driver, Device device, Context* context) {
  static std::mutex mutex;
  static auto& retained = *new std::map<Device, Context>();
  std::lock_guard<std::mutex> lock(mutex);
  if (auto it = retained.find(device); it != retained.end()) {
    *context = it->second;
    return ffi::Error::Success();
  }
  TRACEA_RETURN_IF_ERROR(driver.Check(driver.primary_context_retain(context, device),
                                      "cuDevicePrimaryCtxRetain"));
  retained[device] = *context;
  return ffi::Error::Success();
}

}  // namespace

ffi::Error Driver::Get(const Driver** driver) {
  static const Opened& opened = *new Opened(Open());
  if (!opened.why_not.empty()) return FailedPrecondition(opened.why_not);
  *driver = &opened.driver;
  return ffi::Error::Success();
}

ffi::Error Driver::Check(Result result, const std::string& what) const {
  if (result == 0) return ffi::Error::Success();
  const char* name = nullptr;
  const char* text = nullptr;
  get_error_name(result, &name);
  get_error_string(result, &text);
  std::string message = what + " failed: " + (name != nullptr ? name : "CUDA error") +
                        " (" + std::to_string(result) + ", " +
                        (text != nullptr ? text : "no description") + ").";
  if (result >= kFirstStickyError) {
    message += " An earlier kernel on this device may be the cause.";
  }
  if (result == kErrorOutOfMemory) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, message);
  }
  return ffi::Error::Internal(message);
}

ffi::Error ContextScope::Enter(int ordinal) {
  TRACEA_RETURN_IF_ERROR(
      driver_.Check(driver_.context_get_current(&context_), "cuCtxGetCurrent"));
  if (context_ != nullptr) {
    TRACEA_RETURN_IF_ERROR(
        driver_.Check(driver_.context_get_device(&device_), "cuCtxGetDevice"));
    if (ordinal < 0 || ordinal == device_) return ffi::Error::Success();
  } else if (ordinal < 0) {
    return FailedPrecondition(
        "No CUDA context is current and XLA names no device for this call.");
  }
  TRACEA_RETURN_IF_ERROR(
      driver_.Check(driver_.device_get(&device_, ordinal), "cuDeviceGet"));
  TRACEA_RETURN_IF_ERROR(PrimaryContext(driver_, device_, &context_));
  TRACEA_RETURN_IF_ERROR(
      driver_.Check(driver_.context_push(context_), "cuCtxPushCurrent"));
  pushed_ = true;
  return ffi::Error::Success();
}

ContextScope::~ContextScope() {
  Context popped = nullptr;
  if (pushed_) driver_.context_pop(&popped);
}

}  // namespace tracea::cuda
