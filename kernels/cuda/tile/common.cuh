// Qualifiers, fixed-width integers and 16-bit float storage: what every header needs.
//
// NVRTC has no standard headers, so the names are ours. A host compiler accepts every
// header that is only TRACEA_HOST_DEVICE: index maths can be built and tested anywhere.
#pragma once

#if defined(__CUDACC__)
#define TRACEA_DEVICE __device__ __forceinline__
#define TRACEA_HOST_DEVICE __host__ __device__ __forceinline__
#define TRACEA_UNROLL _Pragma("unroll")
#define TRACEA_NO_UNROLL _Pragma("unroll 1")
#else
#define TRACEA_DEVICE inline
#define TRACEA_HOST_DEVICE inline
#define TRACEA_UNROLL
#define TRACEA_NO_UNROLL
#endif

namespace tracea {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8,
              "the integer aliases must have the widths that their names say");

// Storage only: arithmetic happens in f32, conversion is one PTX cvt.
struct alignas(2) f16 {
  u16 bits;
};
struct alignas(2) bf16 {
  u16 bits;
};

// 16 bytes: a unit, the most that a thread moves at once.
struct alignas(16) Words {
  u32 w[4];
};

constexpr int kWarpSize = 32;
constexpr int kWarpgroupSize = 128;

TRACEA_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The smallest multiple of `unit` that is not below `value`.
TRACEA_HOST_DEVICE constexpr int round_up(int value, int unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace tracea
