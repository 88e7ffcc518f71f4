// The CUDA driver as the library uses it: kernels, memory and streams of one device.
//
// Kernels are launched by the code that XLA's handler uses (ffi/launch_plan.h). No CUDA
// is linked: libcuda.so.1 is opened with the first CUDA context.

#ifndef TRACEA_KERNELS_CAPI_CUDA_H_
#define TRACEA_KERNELS_CAPI_CUDA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tracea::capi {

// Makes a device's context current while it lives. Throws Failure if that cannot be.
class CudaScope {
 public:
  explicit CudaScope(int ordinal);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

 private:
  friend class CudaKernel;
  struct Impl;
  // Impl lives here: entering a context must not allocate.
  alignas(16) char room_[64];
  Impl* impl_;
};

// A kernel and its launch, as a bundle has them.
struct CudaLaunch {
  std::string key, entry, arch;
  std::string sha256;  // of the image
  std::string image;
  std::vector<int64_t> launch, params;  // see ffi/launch_spec.h
};

class CudaKernel {
 public:
  // Loads it into the context of the scope. Throws Failure.
  CudaKernel(const CudaLaunch& launch, const CudaScope& scope);
  ~CudaKernel();

  size_t num_operands() const;

  // Queues one launch; operands are device addresses, num_operands() at least.
  void Launch(const CudaScope& scope, void* const* operands, size_t count,
              void* stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// In the current context; each throws Failure if the driver fails.
void* CudaAllocate(size_t bytes);
void CudaFree(void* memory);
void CudaCopy(void* to, const void* from, size_t bytes, void* stream);
void CudaZero(void* memory, size_t bytes, void* stream);
void CudaSynchronize(void* stream);

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_CUDA_H_
