// An additive bias as what a product of queries and keys starts from, in its fragment:
//
//     s = bias / scale, then s += q k', so that scale s is the biased score
//
// A bias is read where it lies: a row of it for each query, or one for all, with an entry
// for each key, or one for all. A number too low for an f32 becomes kMasked, so that keys
// that all have it weigh alike; -inf stays.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/online_softmax.cuh"

namespace tracea {

TRACEA_DEVICE u32 load_constant(const u32* at) {
  u32 v;
  asm("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
TRACEA_DEVICE u16 load_constant(const u16* at) {
  u16 v;
  asm("ld.global.nc.b16 %0, [%1];" : "=h"(v) : "l"(at));
  return v;
}

// A row of a bias. kPairs: whether all rows start at multiples of two elements.
template <class Element, bool kPairs>
struct BiasRow {
  static_assert(sizeof(Element) == 2, "f32 has its own");
  const Element* start;

  TRACEA_DEVICE float one() const { return widen(*start); }

  // The entries of two keys, of which the second is the next if kPairs.
  TRACEA_DEVICE Pair two(int first, int second) const {
    if constexpr (kPairs) {
      return Packed<Element>{load_constant(reinterpret_cast<const u32*>(start + first))}
          .widen();
    }
    const u16* bits = reinterpret_cast<const u16*>(start);
    const u32 low = load_constant(bits + first), high = load_constant(bits + second);
    return Packed<Element>{high << 16 | low}.widen();
  }

  // Those of an even key and the next; of keys that do not exist any.
  TRACEA_DEVICE Pair two_inside(int key, int count) const {
    if constexpr (kPairs) return two(min(key, count - 2), 0);
    return two(min(key, count - 1), min(key + 1, count - 1));
  }
};

template <bool kPairs>
struct BiasRow<float, kPairs> {
  const float* start;

  TRACEA_DEVICE float one() const { return start[0]; }

  TRACEA_DEVICE Pair two(int first, int second) const {
    if constexpr (kPairs) {
      const float2 pair = *reinterpret_cast<const float2*>(start + first);
      return {pair.x, pair.y};
    }
    return {start[first], start[second]};
  }

  TRACEA_DEVICE Pair two_inside(int key, int count) const {
    if constexpr (kPairs) return two(min(key, count - 2), 0);
    return two(min(key, count - 1), min(key + 1, count - 1));
  }
};

// In units of the product. `unscale`: 1 / scale.
TRACEA_DEVICE float unscaled_bias(float bias, float unscale) {
  const float v = bias * unscale;
  return __float_as_uint(bias) == 0xFF800000u ? bias : (v < kMasked ? kMasked : v);
}

}  // namespace tracea
