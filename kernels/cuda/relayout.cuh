// relayout: row-major matrices as tensor maps take them, rows of whole 16 bytes.
//
//   in  (rows, columns) of 1, 2 or 4-byte elements, rows right behind one another
//   out (rows, stride), stride >= columns, of whole 16 bytes: the same elements; or
//       (3, rows, stride) of bf16: the parts of f32 elements, x = x0 + x1 + x2 exactly
//
// One launch writes one or two matrices, the blocks of one after those of the other. A
// thread makes 16 bytes of the result at a time. What they are made of starts anywhere: the
// units of 16 bytes that it lies in are read whole, and neighbours share them through L1.
// Matrices themselves begin where a unit does. What follows a row's last element is of no
// meaning.
//
// The parts take 8 bits each: x0 = x rounded to bf16, x1 = x - x0 rounded, x2 = the rest.
// Numbers above the largest bf16 are cut, not rounded to infinity. Where x is infinite or
// NaN, so is x0, and the others are zero.
#pragma once

#include "ptx/convert.cuh"
#include "tile/common.cuh"
#include "tile/units.cuh"

namespace tracea {

struct RelayoutParams {
  const void* in;
  void* out;
  u32 rows, columns, stride;
};

// An aligned unit of memory; bytes from `end` on are not read.
TRACEA_DEVICE Words load_unit(const u8* unit, const u8* end) {
  Words words{};
  if (unit + 16 <= end) {
    words = *reinterpret_cast<const Words*>(unit);
  } else if (unit < end) {
    TRACEA_UNROLL
    for (int byte = 0; byte < 16; ++byte) {
      if (unit + byte < end) words.w[byte / 4] |= static_cast<u32>(unit[byte]) << byte % 4 * 8;
    }
  }
  return words;
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

  static constexpr u32 kUnits = kInBytes / 16 + 1;    // that they may lie in
  // Results of a block.
  static constexpr u32 kBlockChunks = Traits::kThreads * Traits::kChunks;

  // What the elements of one chunk are made of.
  struct Source {
    Words units[kUnits];
    u32 past;  // bytes before them
  };

  const RelayoutParams& p;
  const u32 chunks_of_row, chunks;  // of the result, or a part of it
  const u8* const end;

  TRACEA_DEVICE explicit Relayout(const RelayoutParams& params)
      : p(params),
        chunks_of_row(params.stride / kPerChunk),
        chunks(params.rows * chunks_of_row),
        end(static_cast<const u8*>(params.in) +
            static_cast<u64>(params.rows) * params.columns * Traits::kElementBytes) {}

  TRACEA_DEVICE u32 blocks() const { return (chunks + kBlockChunks - 1) / kBlockChunks; }

  TRACEA_DEVICE void run(u32 block) const {
    const u32 first = block * kBlockChunks + threadIdx.x;
    Source sources[Traits::kChunks];
    TRACEA_UNROLL
    for (u32 i = 0; i < Traits::kChunks; ++i) load(first + i * Traits::kThreads, sources[i]);
    TRACEA_UNROLL
    for (u32 i = 0; i < Traits::kChunks; ++i) store(first + i * Traits::kThreads, sources[i]);
  }

  TRACEA_DEVICE void load(u32 chunk, Source& source) const {
    source = {};
    if (chunk >= chunks) return;
    const u32 row = chunk / chunks_of_row;
    const u32 column = (chunk - row * chunks_of_row) * kPerChunk;
    if (column >= p.columns) return;
    const u64 element = static_cast<u64>(row) * p.columns + column;
    const u8* first = static_cast<const u8*>(p.in) + element * Traits::kElementBytes;
    source.past = static_cast<u32>(reinterpret_cast<u64>(first) % 16);
    TRACEA_UNROLL
    for (u32 i = 0; i < kUnits; ++i) {
      const u8* unit = first - source.past + 16 * i;
      if (i + 1 < kUnits || source.past > 0) source.units[i] = load_unit(unit, end);
    }
  }

  TRACEA_DEVICE void store(u32 chunk, const Source& source) const {
    if (chunk >= chunks) return;
    Words in[kUnits - 1];
    TRACEA_UNROLL
    for (u32 i = 0; i + 1 < kUnits; ++i) {
      in[i] = straddling(source.units[i], source.units[i + 1], source.past);
    }
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

template <class Traits>
TRACEA_DEVICE void relayout(const RelayoutParams& matrix) {
  Relayout<Traits>(matrix).run(blockIdx.x);
}

template <class Traits>
TRACEA_DEVICE void relayout(const RelayoutParams& one, const RelayoutParams& other) {
  const u32 blocks = Relayout<Traits>(one).blocks();
  const bool is_one = blockIdx.x < blocks;
  const RelayoutParams matrix = is_one ? one : other;
  Relayout<Traits>(matrix).run(is_one ? blockIdx.x : blockIdx.x - blocks);
}

}  // namespace tracea
