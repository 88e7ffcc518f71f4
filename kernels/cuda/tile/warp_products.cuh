// Products of a warp whose operands are rows of heads in shared memory, and how rows of a
// result leave, for GPUs since sm_80.
//
//     a b'   contracted along the head's columns      both as they lie
//     f b    f contracted with the rows of b          f in registers, b transposed by ldmatrix
//
// A warp owns bands of 16 rows of a. Its accumulators of a band: registers 4 j .. 4 j + 3 are
// columns 8 j .. 8 j + 7, see tile/fragment.cuh. Tiles are laid out as tile/head_copy.cuh
// says. PTX ISA: "ldmatrix", "mma".
#pragma once

#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_store.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/operand_map.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

// Blocks of 16 rows or columns of a slab, and steps of 32 bytes or 16 rows.
using HeadLeft = OperandMap<Swizzle128B, 128, 2, true, false, 1>;
using HeadRight = OperandMap<Swizzle128B, 128, 2, false, false, 1>;
using HeadRightRows = OperandMap<Swizzle128B, 128, 2, false, true, 1>;

// The value, in a register of its own: what is computed from it is computed here, and not
// carried through a loop in registers that there are too few of.
TRACEA_DEVICE int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
TRACEA_DEVICE u32 anew(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Registers of the 8-column block `block`.
template <int kCount>
TRACEA_DEVICE float (&columns_of(float (&c)[kCount], int block))[4] {
  return reinterpret_cast<float(&)[4]>(c[4 * block]);
}

// c += a b'. `a`: the warp's first row of a tile A; `b`: a tile B.
template <class Element, class A, class B, int kBands, int kCount>
TRACEA_DEVICE void multiply_head_columns(float (&c)[kBands][kCount], u32 a, u32 b, int lane) {
  static_assert(A::kColumns == B::kColumns && kCount == B::kRows / 2, "shapes agree");
  const u32 left = a + HeadLeft::first_byte(0, lane);
  const u32 right = b + HeadRight::first_byte(0, lane);
  TRACEA_UNROLL
  for (int step = 0; step < ceil_div(A::kColumns, 16); ++step) {
    u32 x[kBands][4];
    TRACEA_UNROLL
    for (int band = 0; band < kBands; ++band) {
      ldmatrix_x4(x[band],
                  HeadLeft::byte(left, band, step % 4, 0) + step / 4 * A::kSlabBytes);
    }
    TRACEA_UNROLL
    for (int block = 0; block < B::kRows / 16; ++block) {
      u32 y[4];
      ldmatrix_x4(y, HeadRight::byte(right, block, step % 4, 0) + step / 4 * B::kSlabBytes);
      TRACEA_UNROLL
      for (int band = 0; band < kBands; ++band) {
        Mma<Element>::mma(columns_of(c[band], 2 * block), x[band], y[0], y[1]);
        Mma<Element>::mma(columns_of(c[band], 2 * block + 1), x[band], y[2], y[3]);
      }
    }
  }
}

// c += f b. `b`: a tile B, of which f has a column for each row.
template <class Element, class B, int kBands, int kSteps, int kCount>
TRACEA_DEVICE void multiply_head_rows(float (&c)[kBands][kCount],
                                      const u32 (&f)[kBands][kSteps][4], u32 b, int lane) {
  static_assert(B::kRows == 16 * kSteps && kCount == B::kColumns / 2, "shapes agree");
  const u32 right = b + HeadRightRows::first_byte(0, lane);
  TRACEA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    TRACEA_UNROLL
    for (int block = 0; block < ceil_div(B::kColumns, 16); ++block) {
      u32 y[4];
      ldmatrix_x4_trans(
          y, HeadRightRows::byte(right, block % 4, step, 0) + block / 4 * B::kSlabBytes);
      TRACEA_UNROLL
      for (int band = 0; band < kBands; ++band) {
        Mma<Element>::mma(columns_of(c[band], 2 * block), f[band][step], y[0], y[1]);
        if (16 * block + 8 < B::kColumns) {
          Mma<Element>::mma(columns_of(c[band], 2 * block + 1), f[band][step], y[2], y[3]);
        }
      }
    }
  }
}

// The accumulators of two neighbouring blocks of 8 columns are a fragment of 16.
template <class Element, int kSteps>
TRACEA_DEVICE void round_to_fragments(const float (&c)[8 * kSteps], u32 (&f)[kSteps][4]) {
  TRACEA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int first = 8 * step + 2 * i;
      f[step][i] = Packed<Element>::from({c[first], c[first + 1]}).bits;
    }
  }
}

// Rounds a band of a result into a tile of kRows rows at `to`, from row `row` on.
template <class Element, int kRows, int kCount>
TRACEA_DEVICE void stage_band(const float (&c)[kCount], u32 to, int row, int lane) {
  TRACEA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const u32 first = to + Swizzle128B::apply((row + mma_c_row(lane, 2 * half)) * 128 +
                                              2 * mma_c_col(lane, 0));
    TRACEA_UNROLL
    for (int block = 0; block < kCount / 4; ++block) {
      const int at = 4 * block + 2 * half;
      st_shared(Swizzle128B::move(first, block % 8 * 16) + block / 8 * kRows * 128,
                Packed<Element>::from({c[at], c[at + 1]}).bits);
    }
  }
}

// Stores the rows [row, row + kCount) of such a tile that the warp has staged, 16 bytes a
// lane: those before `end`, row 0 of the tile being at `to` in memory.
template <class Element, int kRows, int kColumns, int kCount>
TRACEA_DEVICE void store_staged(u32 from, int row, int end, u8* to, i64 pitch, int lane) {
  const int column = lane % 8 * 8;
  TRACEA_UNROLL
  for (int i = 0; i < kCount / 4; ++i) {
    const int own = row + 4 * i + lane / 8;
    if (own >= end) break;
    const u32 first = from + Swizzle128B::apply(own * 128 + 2 * column);
    TRACEA_UNROLL
    for (int slab = 0; slab < ceil_div(kColumns, 64); ++slab) {
      if (slab * 64 + column >= kColumns) break;
      *reinterpret_cast<Words*>(to + own * pitch + slab * 128 + 2 * column) =
          ld_shared_words(first + slab * kRows * 128);
    }
  }
}

}  // namespace tracea
