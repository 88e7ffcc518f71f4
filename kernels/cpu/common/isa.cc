#include "common/isa.h"

#include <cstring>

#include "common/cpu_features.h"

namespace tracea::cpu {

namespace {

#if defined(__aarch64__)
constexpr const char* kNames[kIsaCount] = {"baseline", "bfmmla"};
#else
constexpr const char* kNames[kIsaCount] = {"baseline", "avx2", "avx512", "avx512_bf16",
                                           "amx"};
#endif

bool IsUsable(Isa isa) {
  switch (isa) {
#if defined(__aarch64__)
    case Isa::kBfmmla:
      return HasBfmmla();
#else
    case Isa::kAvx2:
      return HasAvx2();
    case Isa::kAvx512:
      return HasAvx512();
    case Isa::kAvx512Bf16:
      return HasAvx512Bf16();
    case Isa::kAmx:
      return HasAmx();
#endif
    default:
      return true;
  }
}

}  // namespace

const char* IsaName(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool ParseIsa(const char* name, Isa* isa) {
  for (int i = 0; i < kIsaCount; ++i) {
    if (std::strcmp(kNames[i], name) != 0) continue;
    *isa = static_cast<Isa>(i);
    return true;
  }
  return false;
}

Isa UsableIsa(Isa wanted) {
  int i = static_cast<int>(wanted);
  while (!IsUsable(static_cast<Isa>(i))) --i;
  return static_cast<Isa>(i);
}

}  // namespace tracea::cpu
