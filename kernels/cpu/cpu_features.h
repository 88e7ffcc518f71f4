// What the processor and the operating system allow, as sets the kernels are built for.

#ifndef TRACEA_KERNELS_CPU_CPU_FEATURES_H_
#define TRACEA_KERNELS_CPU_CPU_FEATURES_H_

namespace tracea::cpu {

bool HasAvx2();    // AVX2, FMA and F16C
bool HasAvx512();  // AVX2's set and AVX-512 F, BW, DQ, VL

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_CPU_FEATURES_H_
