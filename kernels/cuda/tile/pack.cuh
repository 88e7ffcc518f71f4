// Packs: 16 bytes of neighbouring elements, the most that a thread moves at once, as f32.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Element>
struct Pack {
  static constexpr int kSize = 16 / sizeof(Element);
  float x[kSize];

  TRACEA_DEVICE static Pack from(const Words& words) {
    Pack pack;
    if constexpr (sizeof(Element) == 4) {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) pack.x[i] = __uint_as_float(words.w[i]);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Pair pair = Packed<Element>{words.w[i]}.widen();
        pack.x[2 * i] = pair.x;
        pack.x[2 * i + 1] = pair.y;
      }
    }
    return pack;
  }
  TRACEA_DEVICE Words words() const {
    Words words;
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        words.w[i] = __float_as_uint(x[i]);
      } else {
        words.w[i] = Packed<Element>::from(Pair{x[2 * i], x[2 * i + 1]}).bits;
      }
    }
    return words;
  }
};

// What memory has at a multiple of 16 bytes.
template <class Element>
TRACEA_DEVICE Pack<Element> load_pack(const Element* from) {
  return Pack<Element>::from(*reinterpret_cast<const Words*>(from));
}
template <class Element>
TRACEA_DEVICE void store_pack(Element* to, const Pack<Element>& pack) {
  *reinterpret_cast<Words*>(to) = pack.words();
}

}  // namespace tracea
