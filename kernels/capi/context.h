// A context: one device, and on a CPU the threads that share its work.

#ifndef TRACEA_KERNELS_CAPI_CONTEXT_H_
#define TRACEA_KERNELS_CAPI_CONTEXT_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "calls/call.h"
#include "tracea.h"

namespace tracea::capi {

// Threads that run scheduled work, the oldest first.
class Threads final : public Pool {
 public:
  explicit Threads(int64_t count);  // the calling thread counts as one
  ~Threads() override;

  int64_t num_threads() const override {
    return static_cast<int64_t>(threads_.size()) + 1;
  }
  void Schedule(std::function<void()> work) override;

 private:
  void Work();
  void End();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

// The array of a caller's tensor, checked: its device, its dtype, its memory, and that it
// is contiguous. `name` is for messages.
Array ArrayOf(const tracea_context& context, const char* name, const tracea_tensor* tensor);

// The same of a view that may be row-major or column-major in its last two dimensions;
// `is_transposed` says which, and `shape` is that of what lies in memory then.
Array MatrixOf(const tracea_context& context, const char* name, const tracea_tensor* tensor,
               int64_t (*shape)[TRACEA_MAX_RANK], bool* is_transposed);

const char* DtypeName(int32_t dtype);

class Action;

// Kernels of the graphs that a context has loaded, by the names of their calls.
class Kernels {
 public:
  void Add(const std::string& call, std::shared_ptr<const Action> kernel);
  void Remove(const Action* kernel);
  std::shared_ptr<const Action> Find(const std::string& call) const;  // or null

 private:
  mutable std::mutex mutex_;
  std::multimap<std::string, std::shared_ptr<const Action>> kernels_;
};

}  // namespace tracea::capi

struct tracea_context {
  tracea_device device;
  std::unique_ptr<tracea::capi::Threads> threads;  // of a CPU
  mutable tracea::capi::Kernels kernels;           // of a GPU

  bool is_cuda() const { return device.platform == TRACEA_CUDA; }
};

#endif  // TRACEA_KERNELS_CAPI_CONTEXT_H_
