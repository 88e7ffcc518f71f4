// Asynchronous copies from global to shared memory, and the plain loads and stores that
// stand in for them where rows are not even multiples of 4 bytes. (PTX ISA, "cp.async".)
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Copies kBytes to `smem`, both aligned to them: zeros unless `inside`, and then nothing is
// read. 16 bytes pass L1 by, and bring their line of 128 bytes to L2.
template <int kBytes>
TRACEA_DEVICE void cp_async_or_zero(u32 smem, const void* source, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async has no other size");
  const u32 read = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem),
                 "l"(source), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem), "l"(source),
                 "n"(kBytes), "r"(read)
                 : "memory");
  }
}

TRACEA_DEVICE void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kYounger of this thread's groups are still in flight.
template <int kYounger>
TRACEA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kYounger) : "memory");
}

// One element of 16 bits; zero, and nothing is read, unless `inside`.
TRACEA_DEVICE u16 load_u16_or_zero(const void* source, bool inside) {
  u16 value = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.global.b16 %0, [%1];\n"
      "}"
      : "+h"(value)
      : "l"(source), "r"(static_cast<u32>(inside)));
  return value;
}

// Two elements of 16 bits as one word.
TRACEA_DEVICE void st_shared_pair(u32 smem, u16 low, u16 high) {
  asm volatile(
      "{\n"
      ".reg .b32 word;\n"
      "mov.b32 word, {%1, %2};\n"
      "st.shared.b32 [%0], word;\n"
      "}" ::"r"(smem),
      "h"(low), "h"(high)
      : "memory");
}

}  // namespace tracea
