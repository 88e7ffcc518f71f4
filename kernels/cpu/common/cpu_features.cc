// CPUID feature bits, and XCR0 for the register state the operating system saves: an
// instruction set whose registers are not saved must not be used. Family and model are
// never looked at, and the vendor only for what is fast. (Intel SDM volume 1, 13.3, 15.2
// and 18.)
//
// On ARM the kernel of the operating system tells both at once. (Linux, elf_hwcaps.)

#include "common/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace tracea::cpu {

#if defined(__x86_64__)

namespace {

struct Features {
  bool avx2, avx512, avx512_bf16, amx;
};

#if defined(TRACEA_EMULATE_AMX)
constexpr bool kEmulatesTiles = true;
#else
constexpr bool kEmulatesTiles = false;
#endif

bool AllOf(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

constexpr uint64_t Bit(int i) { return uint64_t{1} << i; }

uint64_t Xcr0() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// The registers of AMX are large, so Linux saves them only for processes that ask.
bool GetTilePermission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestComponent = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestComponent, kTileData) == 0;
#else
  return false;
#endif
}

bool IsAmd() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx &&
         d == signature_AMD_edx && c == signature_AMD_ecx;
}

Features Detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {};
  // FMA, OSXSAVE, AVX, F16C
  if (!AllOf(c, Bit(12) | Bit(27) | Bit(28) | Bit(29))) return {};
  const uint64_t saved = Xcr0();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  Features found{};
  // State: xmm, ymm. Feature: AVX2.
  found.avx2 = AllOf(saved, Bit(1) | Bit(2)) && AllOf(b, Bit(5));
  // State: opmask, upper zmm halves, zmm16-31. Features: F, DQ, BW, VL.
  found.avx512 = found.avx2 && AllOf(saved, Bit(5) | Bit(6) | Bit(7)) &&
                 AllOf(b, Bit(16) | Bit(17) | Bit(30) | Bit(31));
  // State: tile configuration and data. Features: AMX BF16 and TILE, AVX-512 BF16.
  const bool tiles = AllOf(saved, Bit(17) | Bit(18)) && AllOf(d, Bit(22) | Bit(24));
  const bool bf16 = found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
                    AllOf(a, Bit(5));
  found.amx = bf16 && (kEmulatesTiles || (tiles && GetTilePermission()));
  found.avx512_bf16 = bf16 && (found.amx || IsAmd());
  return found;
}

const Features& Found() {
  static const Features features = Detect();
  return features;
}

}  // namespace

// An instruction set that the build has no kernels for counts as absent.
#if defined(TRACEA_WITHOUT_AVX2)
bool HasAvx2() { return false; }
#else
bool HasAvx2() { return Found().avx2; }
#endif
#if defined(TRACEA_WITHOUT_AVX512)
bool HasAvx512() { return false; }
#else
bool HasAvx512() { return Found().avx512; }
#endif
#if defined(TRACEA_WITHOUT_AVX512_BF16)
bool HasAvx512Bf16() { return false; }
#else
bool HasAvx512Bf16() { return Found().avx512_bf16; }
#endif
#if defined(TRACEA_WITHOUT_AMX)
bool HasAmx() { return false; }
#else
bool HasAmx() { return Found().amx; }
#endif
bool HasBfmmla() { return false; }

#else

bool HasAvx2() { return false; }
bool HasAvx512() { return false; }
bool HasAvx512Bf16() { return false; }
bool HasAmx() { return false; }

#if defined(__aarch64__) && defined(__linux__) && !defined(TRACEA_WITHOUT_BFMMLA)
bool HasBfmmla() {
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
}
#else
bool HasBfmmla() { return false; }
#endif

#endif

}  // namespace tracea::cpu
