// Instruction sets the kernels are built for, in one order for all operations.

#ifndef TRACEA_KERNELS_CPU_COMMON_ISA_H_
#define TRACEA_KERNELS_CPU_COMMON_ISA_H_

#include <cstdint>

namespace tracea::cpu {

// Of this architecture, worse to better; each includes the ones before it. Where an
// operation has nothing of its own for an instruction set and a dtype, it takes the kernel
// of a lower one.
#if defined(__aarch64__)
enum class Isa : int32_t { kBaseline, kBfmmla };
constexpr Isa kBestIsa = Isa::kBfmmla;
constexpr const char* kIsaNames = "baseline, bfmmla";  // for messages
#else
enum class Isa : int32_t { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr Isa kBestIsa = Isa::kAmx;
constexpr const char* kIsaNames =
    "baseline, avx2, avx512, avx512_bf16, amx";  // for messages
#endif
constexpr int kIsaCount = static_cast<int>(kBestIsa) + 1;

const char* IsaName(Isa isa);

// False if there is no instruction set of this name.
bool ParseIsa(const char* name, Isa* isa);

// The best instruction set, `wanted` at most, that build, processor and operating system
// have. The first question for AMX asks the operating system for its use.
Isa UsableIsa(Isa wanted);

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_ISA_H_
