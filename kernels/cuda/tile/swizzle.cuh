// XOR swizzle of shared-memory byte addresses: a ^ ((a >> S) & ((2^B - 1) << M)).
//
//   address bits   ... [ M+S+B-1 .. M+S ] ... [ M+B-1 .. M ] [ M-1 .. 0 ]
//                          row bits   --xor-->    chunk      inside a chunk
//
// The 32, 64 and 128-byte modes of a tensor map are B = 1, 2, 3 with M = 4, S = 3. They
// act on absolute shared addresses: a buffer addressed from its own start by `apply` must
// be aligned to kPeriodBytes. tracea_jax/ir/swizzle.py is the same algebra in Python.
#pragma once

#include "tile/common.cuh"

namespace tracea {

template <int B, int M, int S>
struct Swizzle {
  static_assert(B >= 0 && M >= 0, "a swizzle has no negative number of bits");
  static_assert(S >= B && S >= 1, "a shift below the bit count is not an involution");
  static_assert(M + S + B <= 31, "the swizzle must fit into 32-bit addresses");

  static constexpr int kBits = B, kBase = M, kShift = S;
  static constexpr u32 kMask = ((1u << B) - 1u) << M;
  static constexpr u32 kChunkBytes = 1u << M;
  // The pattern repeats after this many bytes: align every buffer to it.
  static constexpr u32 kPeriodBytes = B == 0 ? kChunkBytes : 1u << (M + S + B);

  TRACEA_HOST_DEVICE static constexpr u32 apply(u32 byte) {
    return byte ^ ((byte >> S) & kMask);
  }

  // apply(byte + distance), given apply(byte), where the two share no bit: a swizzle is
  // linear over xor. For constant distances most of it is an immediate offset.
  TRACEA_HOST_DEVICE static constexpr u32 move(u32 applied, u32 distance) {
    const u32 d = apply(distance);
    return (applied ^ (d & kMask)) + (d & ~kMask);
  }
};

// The modes of a tensor map; NoSwizzle leaves every address alone.
using NoSwizzle = Swizzle<0, 4, 3>;
using Swizzle32B = Swizzle<1, 4, 3>;
using Swizzle64B = Swizzle<2, 4, 3>;
using Swizzle128B = Swizzle<3, 4, 3>;

}  // namespace tracea
