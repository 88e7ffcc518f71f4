// Memory for kernels: workspace of a thread, page sizes, cache sizes.

#ifndef TRACEA_KERNELS_CPU_COMMON_MEMORY_H_
#define TRACEA_KERNELS_CPU_COMMON_MEMORY_H_

#include <cstdint>

namespace tracea::cpu {

// Memory of the calling thread, 64-byte aligned, kept for its next call; null if there
// is not enough. All operations share it: what is in it lasts for one task. Under
// AddressSanitizer nothing may touch what lies beyond `bytes`.
float* ThreadWorkspace(int64_t bytes);

// Bytes between the buffers of a workspace, which nothing may touch.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kFenceBytes = 64;
#else
inline constexpr int64_t kFenceBytes = 0;
#endif

// Only the first `bytes` of `size` may be used from now on, under AddressSanitizer.
void Confine(void* data, int64_t bytes, int64_t size);

inline constexpr int64_t kHugePage = int64_t{2} << 20;

// Asks for huge pages on the part of a large buffer that is about to be written for
// the first time: fewer page faults. Does nothing below 4 MB or off Linux.
void AdviseHugePages(void* data, int64_t bytes);

// Lets malloc keep some 60 MB of freed memory, instead of giving it back and getting it
// page by page again at a program's next result. glibc takes the largest array freed so
// far for what it should keep, up to 32 MB, unless the program or its environment has
// said what it wants; so one is freed, which nothing has touched. Does so once.
void KeepFreedMemory();

// Lines that one set of the first-level data cache holds; 0 if that is not known.
int64_t L1Ways();

// The second-level cache of one core.
int64_t L2Bytes();

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_MEMORY_H_
