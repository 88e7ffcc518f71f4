// Packs of 16 bytes of neighbouring channels as f32: what kernels of norms load and store.
//
// Arrays are aligned to 16 bytes, and the channels of a row are a multiple of a pack's.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Element>
struct Pack {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(Element));
  static_assert(sizeof(Element) == 2 || sizeof(Element) == 4, "f32, bf16 or f16");

  Words words;

  // Of memory that no thread writes while the kernel runs.
  TRACEA_DEVICE static Pack load(const Element* from) {
    Pack pack;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.words.w[0]), "=r"(pack.words.w[1]), "=r"(pack.words.w[2]),
                   "=r"(pack.words.w[3])
                 : "l"(from));
    return pack;
  }

  TRACEA_DEVICE void store(Element* to) const { *reinterpret_cast<Words*>(to) = words; }

  TRACEA_DEVICE void widen(float (&values)[kCount]) const {
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        values[i] = __uint_as_float(words.w[i]);
      } else {
        const Pair pair = Packed<Element>{words.w[i]}.widen();
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }

  TRACEA_DEVICE static Pack narrow(const float (&values)[kCount]) {
    Pack pack;
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        pack.words.w[i] = __float_as_uint(values[i]);
      } else {
        pack.words.w[i] =
            Packed<Element>::from(Pair{values[2 * i], values[2 * i + 1]}).bits;
      }
    }
    return pack;
  }
};

// kCount neighbouring numbers of f32, one for each channel of a pack.
template <int kCount>
TRACEA_DEVICE void load_each(const float* from, float (&values)[kCount]) {
  TRACEA_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    values[i] = v.x;
    values[i + 1] = v.y;
    values[i + 2] = v.z;
    values[i + 3] = v.w;
  }
}

}  // namespace tracea
