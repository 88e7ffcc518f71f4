#include "cuda.h"

#include <dlfcn.h>

#include <new>

#include "cubin_registry.h"
#include "failure.h"
#include "launch_plan.h"
#include "status.h"

namespace tracea::capi {
namespace {

using cuda::Driver;

void Check(const ffi::Error& error) {
  if (!error.failure()) return;
  const bool is_unsupported = error.errc() == ffi::ErrorCode::kFailedPrecondition;
  const bool is_invalid = error.errc() == ffi::ErrorCode::kInvalidArgument;
  throw Failure(is_unsupported ? TRACEA_UNSUPPORTED
                : is_invalid   ? TRACEA_INVALID
                               : TRACEA_CUDA_ERROR,
                error.message());
}

const Driver& TheDriver() {
  const Driver* driver = nullptr;
  const ffi::Error error = Driver::Get(&driver);
  if (error.failure()) throw Failure(TRACEA_CUDA_ERROR, error.message());
  return *driver;
}

// Entry points that the launcher does not need.
struct Memory {
  cuda::Result (*allocate)(unsigned long long*, size_t);
  cuda::Result (*free)(unsigned long long);
  cuda::Result (*copy)(unsigned long long, unsigned long long, size_t, void*);
  cuda::Result (*fill)(unsigned long long, unsigned char, size_t, void*);
  cuda::Result (*synchronize)(void*);
};

template <typename Pointer>
void Find(void* library, const char* name, Pointer* entry) {
  *entry = library ? reinterpret_cast<Pointer>(dlsym(library, name)) : nullptr;
  if (!*entry) Fail(TRACEA_CUDA_ERROR, "The CUDA driver has no ", name, ".");
}

const Memory& TheMemory() {
  static const Memory memory = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    Memory found{};
    Find(library, "cuMemAlloc_v2", &found.allocate);
    Find(library, "cuMemFree_v2", &found.free);
    Find(library, "cuMemcpyAsync", &found.copy);
    Find(library, "cuMemsetD8Async", &found.fill);
    Find(library, "cuStreamSynchronize", &found.synchronize);
    return found;
  }();
  return memory;
}

unsigned long long Address(const void* memory) {
  return reinterpret_cast<unsigned long long>(memory);
}

}  // namespace

struct CudaScope::Impl {
  explicit Impl(const Driver& d) : driver(d), scope(d) {}
  const Driver& driver;
  cuda::ContextScope scope;
};

CudaScope::CudaScope(int ordinal) {
  static_assert(sizeof(Impl) <= sizeof(room_));
  impl_ = new (room_) Impl(TheDriver());
  const ffi::Error error = impl_->scope.Enter(ordinal);
  if (error.failure()) {
    impl_->~Impl();
    Check(error);
  }
}

CudaScope::~CudaScope() { impl_->~Impl(); }

struct CudaKernel::Impl {
  mutable cuda::LaunchPlan plan;  // which kernel is loaded where is part of it
};

CudaKernel::CudaKernel(const CudaLaunch& launch, const CudaScope& scope)
    : impl_(std::make_unique<Impl>()) {
  cuda::LaunchPlan& plan = impl_->plan;
  plan.key = launch.key;
  plan.entry = launch.entry;
  plan.arch = launch.arch;
  if (const char* why_not = WhyNotCubin(launch.image)) {
    Fail(TRACEA_INVALID, "the image of kernel ", launch.entry, " is no cubin: ", why_not);
  }
  plan.image = std::make_shared<const Cubin>(Cubin{launch.image, launch.sha256});
  Check(DecodeLaunch({launch.launch.data(), launch.launch.size()},
                     {launch.params.data(), launch.params.size()}, &plan.spec));
  if (plan.spec.empty()) return;
  const cuda::LoadedKernel* kernel = nullptr;
  Check(cuda::Loaded(scope.impl_->driver, scope.impl_->scope, &plan, &kernel));
}

CudaKernel::~CudaKernel() = default;

size_t CudaKernel::num_operands() const {
  return static_cast<size_t>(impl_->plan.spec.num_operands);
}

void CudaKernel::Launch(const CudaScope& scope, void* const* operands, size_t count,
                        void* stream) const {
  cuda::LaunchPlan& plan = impl_->plan;
  if (plan.spec.empty()) return;
  cuda::Operands all{};
  for (size_t i = 0; i < count && i < all.size(); ++i) all[i] = operands[i];
  const Driver& driver = scope.impl_->driver;
  const cuda::LoadedKernel* kernel = nullptr;
  Check(cuda::Loaded(driver, scope.impl_->scope, &plan, &kernel));
  Check(cuda::Launch(driver, *kernel, plan, all, static_cast<cuda::Stream>(stream)));
}

void* CudaAllocate(size_t bytes) {
  unsigned long long address = 0;
  if (bytes == 0) return nullptr;
  Check(TheDriver().Check(TheMemory().allocate(&address, bytes), "cuMemAlloc"));
  return reinterpret_cast<void*>(address);
}

void CudaFree(void* memory) {
  if (memory) Check(TheDriver().Check(TheMemory().free(Address(memory)), "cuMemFree"));
}

void CudaCopy(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return;
  Check(TheDriver().Check(TheMemory().copy(Address(to), Address(from), bytes, stream),
                          "cuMemcpyAsync"));
}

void CudaZero(void* memory, size_t bytes, void* stream) {
  if (bytes == 0) return;
  Check(TheDriver().Check(TheMemory().fill(Address(memory), 0, bytes, stream),
                          "cuMemsetD8Async"));
}

void CudaSynchronize(void* stream) {
  Check(TheDriver().Check(TheMemory().synchronize(stream), "cuStreamSynchronize"));
}

}  // namespace tracea::capi
