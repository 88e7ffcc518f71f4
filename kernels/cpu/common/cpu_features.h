// What the processor and the operating system allow, as sets the kernels are built for.

#ifndef TRACEA_KERNELS_CPU_COMMON_CPU_FEATURES_H_
#define TRACEA_KERNELS_CPU_COMMON_CPU_FEATURES_H_

namespace tracea::cpu {

bool HasAvx2();    // AVX2, FMA and F16C
bool HasAvx512();  // AVX2's set and AVX-512 F, BW, DQ, VL

// AVX-512's set and AVX-512 BF16, where these are the better instructions or AMX is there
// as well. On AMD's processors VDPBF16PS takes twice the multiply-adds of f32 in a cycle,
// on Intel's half of them: there widened operands are faster, and this set is for tests.
bool HasAvx512Bf16();

// AVX-512's set, AVX-512 BF16, and AMX tiles with BF16 products, which the operating
// system grants to a process that asks: the first call does, and all threads inherit it.
bool HasAmx();

bool HasBfmmla();  // NEON's set and FEAT_BF16 of 64-bit ARM; asked for on Linux only

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_COMMON_CPU_FEATURES_H_
