// Rows of staged sub-tiles, written to memory by a warp, wherever in memory they start.
//
// A row is that of one sub-tile or of two side by side, 128 bytes each, and eight lanes write
// 128 bytes. Memory takes 16 bytes where they are aligned, which is `head` elements behind the
// start of the row: lane c writes the 16 bytes there from element c U + head on, U elements,
// made of two units of shared memory. What is left are U elements, `head` at the start and the
// others at the end: each is a lane's own.
//
//   shared memory   |0       |1       |2       |3       | ...  |7       |    units of U
//   memory         hhh|0       |1       |2       |3   ...     |6      |ttttt
#pragma once

#include "ptx/shared_store.cuh"
#include "tile/common.cuh"
#include "tile/units.cuh"

namespace tracea {

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using Type = u16;
};
template <>
struct BitsOf<4> {
  using Type = u32;
};

template <class Swizzle, class Element, int kSubTiles>
struct StagedRows {
  using Bits = typename BitsOf<sizeof(Element)>::Type;
  static constexpr int kWarpRows = 16, kRowBytes = 128;  // of a sub-tile
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kLanes = kSubTiles * kRowBytes / 16;  // of a row
  static constexpr int kColumns = kLanes * kUnit;
  static_assert(kSubTiles == 1 || kSubTiles == 2, "a row lies in at most two buffers");

  u32 left, right;    // buffers; the same if there is one sub-tile
  int first;          // the warp's first row in them
  int rows, columns;  // of the result, from there on

  // `distance` elements lie between the rows of the result.
  TRACEA_DEVICE void write(Element* result, u64 distance, int lane) const {
    Bits* out = reinterpret_cast<Bits*>(result);
    // Opaquely: what all sub-tiles share would be kept, and there are few registers left.
    // (Not so the address, which would no longer be known to be one of global memory.)
    asm volatile("" : "+r"(lane), "+l"(distance));
    if (columns >= kColumns) {
      write_whole(out, distance, lane);
    } else {
      write_each(out, distance, lane);
    }
  }

 private:
  TRACEA_DEVICE u32 address(int row, int byte) const {
    const u32 buffer = kSubTiles == 1 || byte < kRowBytes ? left : right;
    return buffer + Swizzle::apply(kRowBytes * (first + row) + byte % kRowBytes);
  }

  TRACEA_DEVICE void write_whole(Bits* out, u64 distance, int lane) const {
    constexpr int kAtOnce = kWarpSize / kLanes;
    constexpr int kBatch = 2;  // whose loads are in flight together
    const int c = lane % kLanes;
    Bits* start = out + lane / kLanes * distance;
    TRACEA_NO_UNROLL
    for (int row = lane / kLanes; row < kWarpRows; row += kBatch * kAtOnce) {
      Words low[kBatch], high[kBatch];
      Bits single[kBatch];
      TRACEA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int further = i * kAtOnce, head = head_of(start + further * distance);
        low[i] = ld_shared_words(address(row + further, 16 * c));
        high[i] = ld_shared_words(address(row + further, 16 * ((c + 1) % kLanes)));
        const int byte = single_of(c, head) % kColumns * static_cast<int>(sizeof(Bits));
        ld_shared(address(row + further, byte), single[i]);
      }
      TRACEA_UNROLL
      for (int i = 0; i < kBatch; ++i, start += kAtOnce * distance) {
        if (row + i * kAtOnce >= rows) continue;
        const int head = head_of(start);
        if (head == 0 || c + 1 < kLanes) {
          *reinterpret_cast<Words*>(start + c * kUnit + head) =
              straddling(low[i], high[i], static_cast<u32>(head * sizeof(Bits)));
        }
        if (head > 0 && c < kUnit) start[single_of(c, head)] = single[i];
      }
    }
  }

  TRACEA_DEVICE static int head_of(const Bits* start) {
    const int past = static_cast<int>(reinterpret_cast<u64>(start) / sizeof(Bits) % kUnit);
    return (kUnit - past) % kUnit;
  }

  // The element of a row that a lane writes alone, if the row has a head and it is below U.
  TRACEA_DEVICE static int single_of(int c, int head) {
    return c < head ? c : kColumns - kUnit + c;
  }

  TRACEA_DEVICE void write_each(Bits* out, u64 distance, int lane) const {
    TRACEA_NO_UNROLL
    for (int row = 0; row < kWarpRows; ++row, out += distance) {
      TRACEA_UNROLL
      for (int j = lane; j < kColumns; j += kWarpSize) {
        Bits bits;
        ld_shared(address(row, static_cast<int>(sizeof(Bits)) * j), bits);
        if (row < rows && j < columns) out[j] = bits;
      }
    }
  }
};

}  // namespace tracea
