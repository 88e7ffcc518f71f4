#include "context.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "arithmetic.h"
#include "failure.h"
#include "program.h"

namespace tracea::capi {

Threads::Threads(int64_t count) {
  try {
    for (int64_t i = 1; i < count; ++i) threads_.emplace_back([this] { Work(); });
  } catch (const std::exception& error) {  // those that run would end the process
    const size_t had = threads_.size() + 1;
    End();
    Fail(TRACEA_CPU_ERROR, "There are no ", count, " threads to be had, only ", had, ": ",
         error.what(), ".");
  }
}

Threads::~Threads() { End(); }

void Threads::End() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Threads::Schedule(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void Threads::Work() {
  const XlaArithmetic arithmetic;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
    if (ends_) return;
    std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // not under the lock
    lock.lock();
  }
}

void Kernels::Add(const std::string& call, std::shared_ptr<const Action> kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  kernels_.emplace(call, std::move(kernel));
}

void Kernels::Remove(const Action* kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = kernels_.begin(); it != kernels_.end();) {
    it = it->second.get() == kernel ? kernels_.erase(it) : std::next(it);
  }
}

std::shared_ptr<const Action> Kernels::Find(const std::string& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kernels_.find(call);
  return found == kernels_.end() ? nullptr : found->second;
}

// ---- tensors ------------------------------------------------------------------------

namespace {

std::string DeviceName(const tracea_device& device) {
  if (device.platform == TRACEA_CPU) return "the CPU";
  return "CUDA device " + std::to_string(device.ordinal);
}

void CheckDevice(const tracea_context& context, const char* name,
                 const tracea_device& device) {
  const bool is_same = device.platform == context.device.platform &&
                       (!context.is_cuda() || device.ordinal == context.device.ordinal);
  if (is_same) return;
  Fail(TRACEA_INVALID, name, " is on ", DeviceName(device), " and the context on ",
       DeviceName(context.device), "; copy it there, or use a context of its device.");
}

// Everything but strides.
Array Checked(const tracea_context& context, const char* name,
              const tracea_tensor* tensor) {
  if (!tensor) Fail(TRACEA_INVALID, name, " is null.");
  CheckDevice(context, name, tensor->device);
  if (tensor->dtype < 0 || static_cast<size_t>(tensor->dtype) >= std::size(kDtypes)) {
    Fail(TRACEA_INVALID, name, " has dtype ", tensor->dtype, "; there is none of it.");
  }
  if (tensor->rank < 0 || tensor->rank > TRACEA_MAX_RANK) {
    Fail(TRACEA_INVALID, name, " has rank ", tensor->rank, "; it must be from 0 to ",
         TRACEA_MAX_RANK, ".");
  }
  if (tensor->rank > 0 && !tensor->shape) {
    Fail(TRACEA_INVALID, "the shape of ", name, " is null.");
  }
  const Array array{tensor->data, static_cast<ArrayType>(tensor->dtype),
                    {tensor->shape, static_cast<size_t>(tensor->rank)}};
  for (int64_t dim : array.dims) {
    if (dim < 0) Fail(TRACEA_INVALID, name, " has the shape ", ShapeText(array), ".");
  }
  if (!array.data && array.size() > 0) {
    Fail(TRACEA_INVALID, "the data of ", name, " is null.");
  }
  const int64_t unit = std::min<int64_t>(BytesOf(array.type), 8);
  if (reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(unit) != 0) {
    Fail(TRACEA_INVALID, "the data of ", name, " is not aligned to its elements.");
  }
  return array;
}

// Whether the strides are those of a contiguous array whose last two dimensions are in
// this order.
bool IsContiguous(const tracea_tensor& tensor, bool is_transposed) {
  int64_t order[TRACEA_MAX_RANK];
  for (int i = 0; i < tensor.rank; ++i) order[i] = i;
  if (is_transposed) std::swap(order[tensor.rank - 1], order[tensor.rank - 2]);
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const int64_t axis = order[i];
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != stride) return false;
    stride *= tensor.shape[axis];
  }
  return true;
}

[[noreturn]] void RefuseStrides(const char* name, const tracea_tensor& tensor,
                                const char* allowed) {
  const auto rank = static_cast<size_t>(tensor.rank);
  Fail(TRACEA_UNSUPPORTED, name, " of shape ", ShapeText(Dims{tensor.shape, rank}),
       " has the strides ", ShapeText(Dims{tensor.strides, rank}), "; it must be ", allowed,
       ".");
}

}  // namespace

const char* DtypeName(int32_t dtype) { return kDtypes[static_cast<size_t>(dtype)]; }

Array ArrayOf(const tracea_context& context, const char* name,
              const tracea_tensor* tensor) {
  const Array array = Checked(context, name, tensor);
  if (tensor->strides && array.size() > 0 && !IsContiguous(*tensor, false)) {
    RefuseStrides(name, *tensor, "contiguous");
  }
  return array;
}

Array MatrixOf(const tracea_context& context, const char* name, const tracea_tensor* tensor,
               int64_t (*shape)[TRACEA_MAX_RANK], bool* is_transposed) {
  Array array = Checked(context, name, tensor);
  *is_transposed = false;
  if (!tensor->strides || array.size() == 0 || IsContiguous(*tensor, false)) return array;
  if (tensor->rank < 2 || !IsContiguous(*tensor, true)) {
    RefuseStrides(name, *tensor, "contiguous, or a transposed view of what is");
  }
  *is_transposed = true;
  std::copy_n(tensor->shape, tensor->rank, *shape);
  std::swap((*shape)[tensor->rank - 1], (*shape)[tensor->rank - 2]);
  array.dims.data = *shape;
  return array;
}

}  // namespace tracea::capi
