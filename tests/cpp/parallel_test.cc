// Checks how CPU kernels share work: every index runs once, whatever the pool does with
// the copies that it is given: run them at once, late, or never.

#include "common/parallel.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Task = std::function<void()>;

// Threads that take what is scheduled from the end of a list, so that copies of an
// earlier loop start while a later one runs.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    is_over_ = true;
    for (std::thread& worker : workers_) worker.join();
  }
  void Schedule(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }

 private:
  void Work() {
    while (true) {
      Task task;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!tasks_.empty()) {
          task = std::move(tasks_.back());
          tasks_.pop_back();
        } else if (is_over_) {
          return;
        }
      }
      task ? task() : std::this_thread::yield();
    }
  }

  std::mutex mutex_;
  std::vector<Task> tasks_;
  std::atomic<bool> is_over_{false};
  std::vector<std::thread> workers_;
};

int failures = 0;

// Whether a loop over `count` runs every index once. Plain memory: a race would show.
template <typename Schedule>
void Check(const char* what, int64_t count, int64_t threads, Schedule schedule) {
  std::vector<int> runs(count, 0);
  tracea::cpu::ParallelFor(count, threads, schedule, [&](int64_t i) { ++runs[i]; });
  for (int64_t i = 0; i < count; ++i) {
    if (runs[i] == 1) continue;
    std::printf("%s, %lld indices, %lld threads: index %lld ran %d times\n", what,
                static_cast<long long>(count), static_cast<long long>(threads),
                static_cast<long long>(i), runs[i]);
    ++failures;
  }
}

}  // namespace

int main() {
  std::vector<Task> late;
  {
    Pool pool(4);
    const auto soon = [&](Task task) { pool.Schedule(std::move(task)); };
    const auto never = [](Task) {};
    const auto keep = [&](Task task) { late.push_back(std::move(task)); };
    for (int repeat = 0; repeat < 200; ++repeat) {
      for (const int64_t count : {0, 1, 2, 7, 64}) {
        for (const int64_t threads : {1, 2, 8}) {
          Check("a pool", count, threads, soon);
          Check("a pool that is busy", count, threads, never);
          if (repeat == 0) Check("a pool that is late", count, threads, keep);
        }
      }
    }
    // Several callers at once, as independent operations of one program.
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int repeat = 0; repeat < 100; ++repeat) {
          std::vector<int> runs(16, 0);
          tracea::cpu::ParallelFor(16, 4, soon, [&](int64_t i) { ++runs[i]; });
          for (const int count : runs) {
            if (count != 1) std::abort();
          }
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  for (const Task& task : late) task();  // the loops are long over
  std::printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
