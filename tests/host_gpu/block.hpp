// A GPU's block of threads on a host: each thread a fiber, each wave run as far as a barrier
// of the block lets it go before the next wave is. The order of the waves turns round at
// every barrier, so that one that is missing gives wrong results in either direction.
//
// What a wave does together is computed when all of its lanes have come to it. Lanes that
// come to different things, or waves to different numbers of barriers, end the process.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace host {

// What all lanes of a wave do at once, of what each gives and gets.
using Together = void (*)(void* const* lanes);

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  enum { kRuns, kAtBarrier, kTogether, kDone } state;
  Together together;
  void* given;
};

inline std::vector<Lane> lanes;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline unsigned thread_index, block_index;

inline void fail(const char* why) {
  std::fprintf(stderr, "block %u, thread %u: %s\n", block_index, thread_index, why);
  std::_Exit(3);
}

inline void pause(decltype(Lane::state) state) {
  Lane& lane = lanes[thread_index];
  lane.state = state;
  swapcontext(&lane.context, &scheduler);
}

inline void barrier() { pause(Lane::kAtBarrier); }

inline void together(Together what, void* given) {
  lanes[thread_index].together = what;
  lanes[thread_index].given = given;
  pause(Lane::kTogether);
}

inline void enter() {
  body();
  pause(Lane::kDone);
}

// Runs a wave until all of its lanes are at a barrier of the block, or done.
inline void run_wave(unsigned first, unsigned wave) {
  while (true) {
    for (unsigned i = first; i < first + wave; ++i) {
      if (lanes[i].state != Lane::kRuns) continue;
      thread_index = i;
      swapcontext(&scheduler, &lanes[i].context);
    }
    std::vector<void*> given;
    for (unsigned i = first; i < first + wave; ++i) {
      thread_index = i;
      if (lanes[i].state != lanes[first].state) fail("lanes of a wave diverge");
      given.push_back(lanes[i].given);
    }
    if (lanes[first].state != Lane::kTogether) return;
    for (unsigned i = first; i < first + wave; ++i) {
      if (lanes[i].together != lanes[first].together) fail("lanes do different things");
      lanes[i].state = Lane::kRuns;
    }
    lanes[first].together(given.data());
  }
}

inline void run_block(unsigned threads, unsigned wave, const std::function<void()>& kernel) {
  body = kernel;
  lanes.resize(threads);
  for (Lane& lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack = {lane.stack.data(), 0, lane.stack.size()};
    lane.context.uc_link = nullptr;
    lane.state = Lane::kRuns;
    makecontext(&lane.context, enter, 0);
  }
  for (bool forward = true;; forward = !forward) {
    for (unsigned i = 0; i < threads; i += wave) {
      run_wave(forward ? i : threads - wave - i, wave);
    }
    for (Lane& lane : lanes) {
      if (lane.state != lanes[0].state) fail("not all threads came to the barrier");
    }
    if (lanes[0].state == Lane::kDone) return;
    for (Lane& lane : lanes) lane.state = Lane::kRuns;
  }
}

// `prepare` poisons shared memory, which a block finds with anything in it.
inline void run_grid(unsigned blocks, unsigned threads, unsigned wave,
                     const std::function<void()>& prepare,
                     const std::function<void()>& kernel) {
  for (block_index = 0; block_index < blocks; ++block_index) {
    prepare();
    run_block(threads, wave, kernel);
  }
}

}  // namespace host

// Memory that ends, to 16 bytes, where no access is allowed; what is left over is NaN.
extern "C" inline __attribute__((used)) void* guarded(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (bytes + 15) / 16 * 16, whole = (used + page - 1) / page * page;
  char* begin = static_cast<char*>(mmap(nullptr, whole + 2 * page, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(begin, page, PROT_NONE);
  mprotect(begin + page + whole, page, PROT_NONE);
  std::memset(begin + page, 0xFF, whole);
  return begin + page + whole - used;
}
