// Dynamic parallel loop on somebody else's thread pool.

#ifndef TRACEA_KERNELS_CPU_COMMON_PARALLEL_H_
#define TRACEA_KERNELS_CPU_COMMON_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace tracea::cpu {

// Calls body(i) once for each i in [0, count), on the calling thread and on up to
// `threads` - 1 others got from schedule(callable). Returns when all calls have returned.
//
// The caller works too and then waits only for calls that have started, so the loop ends
// even if the pool never runs a helper: it cannot deadlock, whoever else waits on the
// pool. A helper that comes late finds nothing left and touches only the shared state,
// which it keeps alive; `body` is on the caller's stack and is reached only through an
// index below `count`. `body` must not throw.
template <typename Schedule, typename Body>
void ParallelFor(int64_t count, int64_t threads, const Schedule& schedule,
                 const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count;
    const Body* body;
    void Work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        (*body)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  const int64_t helpers = std::min(threads, count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto state = std::make_shared<State>();
  state->count = count;
  state->body = &body;
  for (int64_t i = 0; i < helpers; ++i) schedule([state] { state->Work(); });
  state->Work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 2000) std::this_thread::yield();
  }
}

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_PARALLEL_H_
