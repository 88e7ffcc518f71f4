// A pack of neighbouring channels as the numbers that they are.
#pragma once

#include "norm/pack.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Element>
struct Wide {
  static constexpr int kCount = Pack<Element>::kCount;
  float x[kCount];

  TRACEA_DEVICE static Wide from(const Words& words) {
    Wide wide;
    Pack<Element>{words}.widen(wide.x);
    return wide;
  }
  TRACEA_DEVICE void store(Element* to) const { Pack<Element>::narrow(x).store(to); }
};

}  // namespace tracea
