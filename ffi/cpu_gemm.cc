// XLA FFI handler of the CPU matrix product; kernels/cpu/calls/gemm_call.cc has its
// contract.

#include "cpu_gemm.h"

#include "calls/gemm_call.h"
#include "cpu_call.h"

namespace tracea {

const char* SupportedCpuIsa() { return cpu::IsaName(cpu::UsableIsa(cpu::kBestIsa)); }

}  // namespace tracea

TRACEA_CPU_HANDLER(tracea_cpu_gemm_v1, tracea::ParseGemm, tracea::RunGemm);
