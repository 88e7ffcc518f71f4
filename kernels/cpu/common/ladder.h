// From the instruction sets of build and machine to an operation's kernels.

#ifndef TRACEA_KERNELS_CPU_COMMON_LADDER_H_
#define TRACEA_KERNELS_CPU_COMMON_LADDER_H_

#include "common/isa.h"

namespace tracea::cpu {

// An operation's kernels by Isa; null where the build, or the operation, has none.
template <typename Kernels>
struct Ladder {
  const Kernels* rungs[kIsaCount];

  // Those of the best instruction set, `wanted` at most, that machine and build have and
  // that suits(kernels). The baseline's must suit everything.
  template <typename Suits>
  const Kernels* Best(Isa wanted, const Suits& suits) const {
    int isa = static_cast<int>(UsableIsa(wanted));
    while (!rungs[isa] || !suits(*rungs[isa])) --isa;
    return rungs[isa];
  }
};

// Kernels of an instruction set, or null where the build has none for it, so that nothing
// refers to what is not there.
#if defined(TRACEA_WITHOUT_AVX2)
#define TRACEA_IF_AVX2(kernels) nullptr
#else
#define TRACEA_IF_AVX2(kernels) kernels
#endif
#if defined(TRACEA_WITHOUT_AVX512)
#define TRACEA_IF_AVX512(kernels) nullptr
#else
#define TRACEA_IF_AVX512(kernels) kernels
#endif
#if defined(TRACEA_WITHOUT_AVX512_BF16)
#define TRACEA_IF_AVX512_BF16(kernels) nullptr
#else
#define TRACEA_IF_AVX512_BF16(kernels) kernels
#endif
#if defined(TRACEA_WITHOUT_AMX)
#define TRACEA_IF_AMX(kernels) nullptr
#else
#define TRACEA_IF_AMX(kernels) kernels
#endif
#if defined(TRACEA_WITHOUT_BFMMLA)
#define TRACEA_IF_BFMMLA(kernels) nullptr
#else
#define TRACEA_IF_BFMMLA(kernels) kernels
#endif

// The ladder of these kernels, each null or the address of a constant.
#if defined(__x86_64__)
#define TRACEA_LADDER(baseline, avx2, avx512, avx512_bf16, amx, bfmmla)             \
  {{baseline, TRACEA_IF_AVX2(avx2), TRACEA_IF_AVX512(avx512),                       \
    TRACEA_IF_AVX512_BF16(avx512_bf16), TRACEA_IF_AMX(amx)}}
#elif defined(__aarch64__)
#define TRACEA_LADDER(baseline, avx2, avx512, avx512_bf16, amx, bfmmla) \
  {{baseline, TRACEA_IF_BFMMLA(bfmmla)}}
#else
#define TRACEA_LADDER(baseline, avx2, avx512, avx512_bf16, amx, bfmmla) {{baseline}}
#endif

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_LADDER_H_
