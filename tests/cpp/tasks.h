// Runs the tasks of a plan as the tests of kernels do: each in memory of its own, of
// exactly the bytes that the plan reports.

#ifndef TRACEA_TESTS_CPP_TASKS_H_
#define TRACEA_TESTS_CPP_TASKS_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "common/parallel.h"

namespace tracea::cpu {

// Beyond a workspace, where no sanitizer watches the end of a heap block.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kGuardBytes = 0;
#else
constexpr int64_t kGuardBytes = 64;
#endif

// Calls body(task, workspace) for each task. Workspaces hold NaN in every type, so that a
// kernel which reads what it has not written gives a wrong result. A write beyond one ends
// the process.
template <typename Body>
void RunTasks(int64_t tasks, int64_t threads, int64_t workspace_bytes, const Body& body) {
  std::vector<std::thread> helpers;
  ParallelFor(
      tasks, threads, [&](auto work) { helpers.emplace_back(work); },
      [&](int64_t task) {
        const int64_t size = workspace_bytes + kGuardBytes;
        const std::unique_ptr<void, decltype(&std::free)> memory(
            std::aligned_alloc(64, size), &std::free);
        std::memset(memory.get(), 0xff, size);
        body(task, static_cast<float*>(memory.get()));
        const auto* guard = static_cast<uint8_t*>(memory.get()) + workspace_bytes;
        for (int64_t i = 0; i < kGuardBytes; ++i) {
          if (guard[i] == 0xff) continue;
          std::printf("byte %lld after a workspace of %lld was written\n",
                      static_cast<long long>(i), static_cast<long long>(workspace_bytes));
          std::abort();
        }
      });
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace tracea::cpu

#endif  // TRACEA_TESTS_CPP_TASKS_H_
