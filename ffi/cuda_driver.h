// The few entry points of the CUDA driver that launching needs, found at run time.
//
// The extension is built without CUDA headers and links no CUDA library: it loads on any
// machine, and libcuda.so.1 is opened when the first kernel is prepared. The declarations
// follow the CUDA Driver API reference; the ABI of these structs is stable.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"

namespace tracea::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;  // CUdevice
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;

// CUtensorMap: opaque, 128 bytes, passed to kernels by value.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");

// CUlaunchAttribute: an id and a union of 64 bytes; only cluster dimensions are used.
struct alignas(8) LaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "a launch attribute has 72 bytes");

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned smem_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "a launch configuration has 56 bytes");

enum : int {
  kErrorOutOfMemory = 2,
  kFirstStickyError = 700,  // illegal address and later: the context is lost
  kLaunchAttributeClusterDimension = 4,
  kAttributeComputeCapabilityMajor = 75,
  kAttributeComputeCapabilityMinor = 76,
  kFunctionMaxDynamicSharedBytes = 8,
  kFunctionNonPortableClusterSizeAllowed = 14,
  kInterleaveNone = 0,
  kL2Promotion128B = 2,
  kL2Promotion256B = 3,
  kOobFillNone = 0,
};

struct Driver {
  Result (*init)(unsigned flags);
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_get_attribute)(int*, int attribute, Device);
  Result (*primary_context_retain)(Context*, Device);
  Result (*context_get_current)(Context*);
  Result (*context_get_device)(Device*);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*module_load_data)(Module*, const void* image);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*function_set_attribute)(Function, int attribute, int value);
  Result (*function_load)(Function);  // null before CUDA 12.4
  Result (*launch)(const LaunchConfig*, Function, void** params, void** extra);
  Result (*tensor_map_encode_tiled)(TensorMap*, int dtype, uint32_t rank, void* address,
                                    const uint64_t* dims, const uint64_t* strides,
                                    const uint32_t* box, const uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion,
                                    int oob_fill);
  Result (*tensor_map_encode_im2col)(TensorMap*, int dtype, uint32_t rank, void* address,
                                     const uint64_t* dims, const uint64_t* strides,
                                     const int* lower, const int* upper,
                                     uint32_t channels, uint32_t pixels,
                                     const uint32_t* element_strides, int interleave,
                                     int swizzle, int l2_promotion,
                                     int oob_fill);  // null where the driver has none

  // The one table of this process, opened on first use. Fails with a reason and a remedy.
  static ffi::Error Get(const Driver** driver);

  // Success, or an error saying that `what` failed and which CUDA error that was.
  ffi::Error Check(Result result, const std::string& what) const;
};

// Makes the context of a device current for the lifetime of the scope.
//
// XLA usually has one current already and then nothing is pushed. `ordinal` -1 means
// whichever device is current.
class ContextScope {
 public:
  explicit ContextScope(const Driver& driver) : driver_(driver) {}
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  ffi::Error Enter(int ordinal);

  Context context() const { return context_; }
  Device device() const { return device_; }

 private:
  const Driver& driver_;
  Context context_ = nullptr;
  Device device_ = -1;
  bool pushed_ = false;
};

}  // namespace tracea::cuda
