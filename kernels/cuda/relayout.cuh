// relayout: a row-major matrix as a tensor map takes it, rows of whole 16 bytes.
//
//   in  (rows, columns) of 1, 2 or 4-byte elements, rows right behind one another
//   out (rows, stride), stride >= columns, of whole 16 bytes: the same elements; or
//       (3, rows, stride) of bf16: the parts of f32 elements, x = x0 + x1 + x2 exactly
//
// A thread makes 16 bytes of the result at a time. What they are made of starts anywhere:
// it is read in words of 4 bytes, which neighbours share through L1, and shifted into place.
// What follows a row's last element is of no meaning.
//
// The parts take 8 bits each: x0 = x rounded to bf16, x1 = x - x0 rounded, x2 = the rest.
// Numbers above the largest bf16 are cut, not rounded to infinity. Where x is infinite or
// NaN, so is x0, and the others are zero.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"

namespace tracea {

struct alignas(16) Words {
  u32 w[4];
};

struct RelayoutParams {
  const void* in;
  void* out;
  u32 rows, columns, stride;
};

// 16 bytes of memory that start at any multiple of 1 byte; those from `end` on are not read.
TRACEA_DEVICE Words load_words(const u8* first, const u8* end) {
  const u64 address = reinterpret_cast<u64>(first);
  if (address % 16 == 0 && first + 16 <= end) {
    return *reinterpret_cast<const Words*>(first);
  }
  const u32 shift = 8 * static_cast<u32>(address % 4);
  const u8* word = first - address % 4;
  u32 words[5];
  TRACEA_UNROLL
  for (int i = 0; i < 5; ++i, word += 4) {
    words[i] = 0;
    if (word + 4 <= end) {
      words[i] = *reinterpret_cast<const u32*>(word);
    } else {
      TRACEA_UNROLL
      for (int byte = 0; byte < 4; ++byte) {
        if (word + byte >= first && word + byte < end) {
          words[i] |= static_cast<u32>(word[byte]) << (8 * byte);
        }
      }
    }
  }
  Words result;
  TRACEA_UNROLL
  for (int i = 0; i < 4; ++i) {
    result.w[i] = __funnelshift_r(words[i], words[i + 1], shift);
  }
  return result;
}

// The parts of two numbers, packed: x0, x1 and x2 of both.
struct Parts {
  u32 pair[3];
};

TRACEA_DEVICE Parts split(Pair x) {
  constexpr float kLargest = 3.38953139e38f;  // of bf16
  const float x_cut = fminf(fmaxf(x.x, -kLargest), kLargest);
  const float y_cut = fminf(fmaxf(x.y, -kLargest), kLargest);
  const Packed<bf16> near = Packed<bf16>::from({x_cut, y_cut});
  const Pair x0 = near.widen();
  const bool x_finite = fabsf(x.x) < __int_as_float(0x7F800000);
  const bool y_finite = fabsf(x.y) < __int_as_float(0x7F800000);
  const Pair rest{x_finite ? x.x - x0.x : 0.0f, y_finite ? x.y - x0.y : 0.0f};
  const Packed<bf16> second = Packed<bf16>::from(rest);
  const Pair x1 = second.widen();
  const Packed<bf16> third = Packed<bf16>::from({rest.x - x1.x, rest.y - x1.y});
  const Packed<bf16> first =
      Packed<bf16>::from({x_finite ? x0.x : x.x, y_finite ? x0.y : x.y});
  return {{first.bits, second.bits, third.bits}};
}

template <class Traits>
struct Relayout {
  static constexpr u32 kOutBytes = Traits::kSplits ? 2 : Traits::kElementBytes;
  static constexpr u32 kPerChunk = 16 / kOutBytes;  // elements of 16 bytes of the result
  static constexpr u32 kInBytes = kPerChunk * Traits::kElementBytes;
  static_assert(!Traits::kSplits || Traits::kElementBytes == 4, "f32 has parts");

  const RelayoutParams& p;
  const u32 chunks_of_row, chunks;  // of the result, or a part of it
  const u8* const end;

  TRACEA_DEVICE explicit Relayout(const RelayoutParams& params)
      : p(params),
        chunks_of_row(params.stride / kPerChunk),
        chunks(params.rows * chunks_of_row),
        end(static_cast<const u8*>(params.in) +
            static_cast<u64>(params.rows) * params.columns * Traits::kElementBytes) {}

  TRACEA_DEVICE void run() const {
    const u32 first = blockIdx.x * Traits::kThreads * Traits::kChunks + threadIdx.x;
    Words in[Traits::kChunks][kInBytes / 16];
    TRACEA_UNROLL
    for (u32 i = 0; i < Traits::kChunks; ++i) load(first + i * Traits::kThreads, in[i]);
    TRACEA_UNROLL
    for (u32 i = 0; i < Traits::kChunks; ++i) store(first + i * Traits::kThreads, in[i]);
  }

  TRACEA_DEVICE void load(u32 chunk, Words (&in)[kInBytes / 16]) const {
    if (chunk >= chunks) return;
    const u32 row = chunk / chunks_of_row;
    const u32 column = (chunk - row * chunks_of_row) * kPerChunk;
    if (column >= p.columns) return;
    const u64 element = static_cast<u64>(row) * p.columns + column;
    const u8* first = static_cast<const u8*>(p.in) + element * Traits::kElementBytes;
    TRACEA_UNROLL
    for (u32 i = 0; i < kInBytes / 16; ++i) in[i] = load_words(first + 16 * i, end);
  }

  TRACEA_DEVICE void store(u32 chunk, const Words (&in)[kInBytes / 16]) const {
    if (chunk >= chunks) return;
    Words* out = static_cast<Words*>(p.out) + chunk;
    if constexpr (!Traits::kSplits) {
      *out = in[0];
    } else {
      Words parts[3];
      TRACEA_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        const Words& four = in[pair / 2];
        const Parts split_pair = split({__uint_as_float(four.w[pair % 2 * 2]),
                                        __uint_as_float(four.w[pair % 2 * 2 + 1])});
        TRACEA_UNROLL
        for (int part = 0; part < 3; ++part) parts[part].w[pair] = split_pair.pair[part];
      }
      TRACEA_UNROLL
      for (int part = 0; part < 3; ++part) {
        out[static_cast<u64>(part) * chunks] = parts[part];
      }
    }
  }
};

}  // namespace tracea
