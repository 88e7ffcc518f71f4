#include "common/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if defined(__unix__)
#include <unistd.h>
#endif

namespace tracea::cpu {

namespace {

#if defined(__linux__)
uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
#endif

}  // namespace

void Confine([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes,
             [[maybe_unused]] int64_t size) {
#if defined(__SANITIZE_ADDRESS__)
  if (!data) return;
  __asan_unpoison_memory_region(data, bytes);
  __asan_poison_memory_region(static_cast<char*>(data) + bytes, size - bytes);
#endif
}

float* ThreadWorkspace(int64_t bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
    ~Buffer() { Free(); }
    void Free() {
      Confine(data, bytes, bytes);
      std::free(data);
    }
  };
  thread_local Buffer buffer;
  if (buffer.bytes < bytes) {
    buffer.Free();
    const int64_t align = bytes >= kHugePage / 4 ? kHugePage : 64;
    const int64_t size = (bytes + align - 1) / align * align;
    buffer.data = std::aligned_alloc(align, size);
    buffer.bytes = buffer.data ? size : 0;
    if (buffer.data) AdviseHugePages(buffer.data, size);
  }
  Confine(buffer.data, bytes, buffer.bytes);  // it may be longer, from an earlier call
  return static_cast<float*>(buffer.data);
}

void AdviseHugePages(void* data, int64_t bytes) {
#if defined(__linux__)
  if (bytes < 2 * kHugePage) return;
  // All of it: mappings of one kind are joined, and a huge page may lie across two.
  const auto at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t page = PageBytes();
  const uintptr_t begin = (at + page - 1) & ~(page - 1);
  const uintptr_t end = (at + bytes) & ~(page - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

void KeepFreedMemory() {
#if defined(__GLIBC__)
  static const bool is_done = [] {
    constexpr size_t kMost = 4 * sizeof(long) << 20, kHeader = 1 << 20;  // and padding
    void* volatile memory = std::malloc(kMost - kHeader);
    std::free(memory);
    return true;
  }();
  (void)is_done;
#endif
}

int64_t L1Ways() {
  static const int64_t ways = [] {
    int64_t found = 0;
#if defined(_SC_LEVEL1_DCACHE_ASSOC)
    found = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
#endif
    return std::max<int64_t>(found, 0);
  }();
  return ways;
}

int64_t L2Bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return std::clamp<int64_t>(found > 0 ? found : 512 << 10, 256 << 10, 4 << 20);
  }();
  return bytes;
}

}  // namespace tracea::cpu
