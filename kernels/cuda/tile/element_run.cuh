// Runs: some neighbouring elements in memory, as f32, by the widest loads and stores.
//
// Assumes that a run begins at a multiple of its bytes, or of 16 where it has more.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

template <class Element, int kCount>
struct Run {
  static constexpr int kElementsOfWord = 4 / static_cast<int>(sizeof(Element));
  static constexpr int kWords = kCount / kElementsOfWord;
  static_assert(kWords == 1 || kWords % 2 == 0, "whole loads");
  float x[kCount];

  TRACEA_DEVICE static Run load(const Element* from) {
    u32 words[kWords];
    if constexpr (kWords % 4 == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else if constexpr (kWords % 2 == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < kWords; i += 2) {
        const uint2 two = reinterpret_cast<const uint2*>(from)[i / 2];
        words[i] = two.x, words[i + 1] = two.y;
      }
    } else {
      words[0] = *reinterpret_cast<const u32*>(from);
    }
    Run run;
    TRACEA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Element) == 4) {
        run.x[i] = __uint_as_float(words[i]);
      } else {
        const Pair pair = Packed<Element>{words[i]}.widen();
        run.x[2 * i] = pair.x, run.x[2 * i + 1] = pair.y;
      }
    }
    return run;
  }

  TRACEA_DEVICE void store(Element* to) const {
    u32 words[kWords];
    TRACEA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Element) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = Packed<Element>::from(Pair{x[2 * i], x[2 * i + 1]}).bits;
      }
    }
    if constexpr (kWords % 4 == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(to)[i / 4] =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else if constexpr (kWords % 2 == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < kWords; i += 2) {
        reinterpret_cast<uint2*>(to)[i / 2] = make_uint2(words[i], words[i + 1]);
      }
    } else {
      *reinterpret_cast<u32*>(to) = words[0];
    }
  }
};

}  // namespace tracea
