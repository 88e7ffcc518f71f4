// The residual of a warpgroup's part of a tile: copied ahead into the buffers that results
// leave from, or loaded into registers.
//
// A residual of boxes like the result's arrives in the buffers by tensor map: that of
// sub-tile j where the result of sub-tile j will be staged, which takes its place pair by
// pair. Its copy starts once the store before has read the buffer:
//
//   before the mainloop:   copies 0 .. buffers-2   (the last store may still be read)
//   before step 0:         copy buffers-1
//   in step j > 0:         copy j + buffers-1, into the buffer of step j-1
//
// Each sub-tile of a tile has a barrier for its copy, which completes a phase a tile. All
// threads wait for the phase before they reach the barrier of step j, and the next copy to
// complete one starts after that: a parity is never a phase behind.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "tile/common.cuh"
#include "tile/epilogue_tiles.cuh"

namespace tracea {

template <class Traits>
class EpilogueResidual {
 public:
  using Element = typename Traits::ElementResidual;
  using Tiles = EpilogueTiles<Traits>;
  using Tile = typename Tiles::Tile;
  using Place = typename Tiles::Place;
  // Whether the residual is copied into the buffers: its boxes must be the result's, and
  // take turns with nothing else. z would be staged in between, and blocks that share a
  // tile store a part of its sub-tiles. (Transposed products, TF32 alone, are not worth it.)
  static constexpr bool kIsMapped =
      Traits::kHasResidual && Traits::kMapsResults && !Tiles::kTransposed &&
      Traits::kClusterK == 1 && !Traits::kSavesPreactivation &&
      sizeof(Element) == sizeof(typename Tiles::Element);
  static constexpr int kCopies = kIsMapped ? Tiles::kCount : 0;
  static_assert(Traits::kMapsResidual == kIsMapped,
                "the residual has a tensor map exactly where it is copied into buffers");

  // `barriers`: shared-memory address of one for each copy.
  TRACEA_DEVICE EpilogueResidual(const EpilogueParams<Traits>& params, u32 buffers,
                                 u32 barriers, int thread, bool is_leader)
      : params_(params),
        buffers_(buffers),
        barriers_(barriers),
        thread_(thread),
        is_leader_(is_leader) {}

  // Starts on the residual of the tile at (m, n); `buffer_idx` is the next to stage into.
  TRACEA_DEVICE void prefetch(int m, int n, int batch, int buffer_idx) {
    if constexpr (kIsFetchedAhead) load(m, n, batch, 0);
    if constexpr (kIsMapped) {
      if (is_leader_) cp_async_bulk_wait_group_read<1>();
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kEpilogueBuffers - 1; ++i) {
        copy(m, n, batch, i, i, buffer_idx);
      }
    }
  }

  TRACEA_DEVICE void begin_tile(int m, int n, int batch, int buffer_idx) {
    if constexpr (kIsMapped) copy_next(m, n, batch, 0, buffer_idx);
  }
  TRACEA_DEVICE void end_tile() { parity_ ^= 1; }

  // After this, `chunk` has what sub-tile `index` needs.
  TRACEA_DEVICE void wait(int m, int n, int batch, int index) {
    if constexpr (kIsMapped) {
      while (!mbarrier_try_wait_parity(barriers_ + 8 * index, parity_)) {
      }
    } else if constexpr (Traits::kHasResidual && !kIsFetchedAhead) {
      load(m, n, batch, index);
    }
  }

  // Sub-tile `index` needs it no more.
  TRACEA_DEVICE void advance(int m, int n, int batch, int index, int buffer_idx) {
    if constexpr (kIsMapped) {
      if (index > 0) copy_next(m, n, batch, index, buffer_idx);
    } else if constexpr (kIsFetchedAhead) {
      if (index + 1 < Tiles::kCount) load(m, n, batch, index + 1);
    }
  }

  // What this thread has of a chunk, from the buffer or from registers.
  TRACEA_DEVICE Chunk<Element> chunk(u32 buffer, int chunk) const {
    Chunk<Element> c;
    if constexpr (kIsMapped) {
      unstage<typename Traits::Swizzle>(buffer, thread_, chunk, c);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c.pairs[i / 2][i % 2] = loaded_[Tile::block(chunk, i / 2)][i % 2];
      }
    }
    return c;
  }

 private:
  // The residual of a sub-tile is loaded as soon as that of the one before is used: if they
  // follow each other, and loads of whole pairs leave enough registers.
  static constexpr bool kIsFetchedAhead = Traits::kHasResidual && !kIsMapped &&
                                          Traits::kClusterK == 1 && Traits::kMapsResults;

  // Copies sub-tile `index`, if there is one, into the buffer that is `ahead` of the one
  // whose turn it is, and which has been read.
  TRACEA_DEVICE void copy(int m, int n, int batch, int index, int ahead, int buffer_idx) {
    if (index < Tiles::kCount && is_leader_) {
      const int last = Traits::kEpilogueBuffers - ahead;
      const int into = buffer_idx + (buffer_idx < last ? ahead : -last);
      const Corner at = Tiles::corner(m, n, index);
      const u32 barrier = barriers_ + 8 * index;
      mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
      cp_async_bulk_tensor_3d(buffers_ + into * Tile::kBytes, params_.residual, at.column,
                              at.row, batch, barrier);
    }
  }

  // In step `index`, copies into the buffer of the step before.
  TRACEA_DEVICE void copy_next(int m, int n, int batch, int index, int buffer_idx) {
    constexpr int kAhead = Traits::kEpilogueBuffers - 1;
    if (index + kAhead < Tiles::kCount) {
      if (is_leader_) cp_async_bulk_wait_group_read<0>();
      copy(m, n, batch, index + kAhead, kAhead, buffer_idx);
    }
  }

  // Loads sub-tile `index` into registers.
  TRACEA_DEVICE void load(int m, int n, int batch, int index) {
    const Corner at = Tiles::corner(m, n, index);
    const int column = at.column + Place::col(thread_, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + Place::row(thread_, 0, half);
      const u64 first = (static_cast<u64>(batch) * params_.m + row) * params_.n + column;
      const Element* residual = static_cast<const Element*>(params_.residual) + first;
      if constexpr (Tiles::kTransposed) {
        load_column<0>(residual, params_.m - row, params_.n - column, half);
      } else {
        load_row<0>(residual, row < params_.m ? params_.n - column : 0, half);
      }
    }
  }

  // The pairs of this thread in one row; `count` elements of the row are left.
  template <int kBlock>
  TRACEA_DEVICE void load_row(const Element* row, int count, int half) {
    if constexpr (kBlock < Tile::kBlocks) {
      loaded_[kBlock][half] = load_pair<8 * kBlock>(row, count);
      load_row<kBlock + 1>(row, count, half);
    }
  }

  // Its pairs in every eighth row; `rows` rows are left, and `count` elements in each. Each
  // address is made of the one before, opaquely: all at once they would take the registers.
  template <int kBlock>
  TRACEA_DEVICE void load_column(const Element* row, int rows, int count, int half) {
    if constexpr (kBlock < Tile::kBlocks) {
      int left = 8 * kBlock < rows ? count : 0;
      asm volatile("" : "+l"(row), "+r"(left));
      loaded_[kBlock][half] = load_pair<0>(row, left);
      const u64 distance = 8 * static_cast<u64>(params_.n);
      load_column<kBlock + 1>(row + distance, rows, count, half);
    }
  }

  template <int kOffset>
  TRACEA_DEVICE static Packed<Element> load_pair(const Element* row, int count) {
    if constexpr (Traits::kMapsResults) {
      return load_pair_before<kOffset>(row, count);
    } else {
      return load_each_before<kOffset>(row, count);
    }
  }

  const EpilogueParams<Traits>& params_;
  const u32 buffers_, barriers_;
  const int thread_;
  const bool is_leader_;
  u32 parity_ = 0;  // of the copies of this tile
  // Of the sub-tile that is next, unless it is copied into a buffer.
  Packed<Element> loaded_[Tile::kBlocks][2];
};

}  // namespace tracea
