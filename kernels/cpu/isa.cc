#include "isa.h"

#include <cstring>

#include "cpu_features.h"

namespace tracea::cpu {

namespace {

constexpr const char* kNames[kIsaCount] = {"baseline", "avx2", "avx512", "amx"};

bool IsUsable(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return HasAvx2();
    case Isa::kAvx512:
      return HasAvx512();
    case Isa::kAmx:
      return HasAmx();
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
