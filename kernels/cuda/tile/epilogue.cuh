// What happens to a warpgroup's accumulators: z = acc + bias, y = activation(z) + residual
// (or times residual), one rounding, and a store through shared memory that runs on while
// the next tile starts. Of a gated product y = activation(g) * u, the accumulators are
// those of g and then, as many columns, those of u. Of a derivative the residual is the z of
// an earlier product: y = activation'(residual) acc. It may also leave the sums of the
// columns of y before it is rounded: each warp those of its own rows, in plain stores.
//
// A 64 x N slab leaves in sub-tiles of 64 rows x 128 bytes, the widest box of a swizzled
// tensor map. They take turns in a ring of buffers that belongs to the warpgroup alone:
//
//   step j:  stage into buffer j | fence | leader: buffer j+1 has been read | barrier |
//            leader: store buffer j
//
// One barrier serves both ways: it publishes buffer j and frees buffer j+1.
//
// A residual of boxes like the result's arrives in the buffers, too, by tensor map: that of
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
//
// Rows that are no multiples of 16 bytes have no tensor map. Each warp then writes the rows
// that it staged itself, see staged_rows.cuh. Where it can it waits for a neighbour on the
// right and writes both: of short rows that start anywhere, much is parts of sectors.
//
// The accumulated product may be the transposed result. Then its rows are paired columns of
// the result (see fragment.cuh), and a sub-tile of 64 rows is as many columns of 128 bytes:
// one box of 16-bit elements, two of f32. m, n and tile count the accumulated product here,
// EpilogueParams and Corner the result.
//
// Traits: ElementOut, ElementBias, ElementResidual, Swizzle, kTileN, kSlabs, kGated,
// kTransposed, kClusterK, kMapsResults, kMapsResidual, kEpilogueBuffers, kHasBias,
// kBiasIsBatched, kHasResidual, kMultipliesResidual, kDifferentiates, kSumsColumns,
// kSummedSlabs, kSavesPreactivation, kActivation.
//
// Zeros are added where there is no bias but a residual in registers or a second result.
// They come from shared memory after a barrier, which keeps the compiler from starting on
// all sub-tiles at once and running out of registers. A derivative waits for its residual
// anyway.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/activation.cuh"
#include "tile/column_sums.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/staged_rows.cuh"
#include "tile/sub_tile.cuh"

namespace tracea {

// How a matrix is reached: through its tensor map, or by its address.
template <bool kMapped, class Address>
struct MatrixPointer {
  using Type = const TensorMap*;
};
template <class Address>
struct MatrixPointer<false, Address> {
  using Type = Address;
};

template <class Traits>
struct EpilogueParams {
  using Result = typename MatrixPointer<Traits::kMapsResults, void*>::Type;
  using Residual = typename MatrixPointer<Traits::kMapsResidual, const void*>::Type;
  Result out;
  Result preactivation;  // z, or g; null unless it is saved
  Result factor;         // u, null unless it is saved
  const void* bias;      // (n) or (batch, n), or null
  Residual residual;     // (batch, m, n), or null
  int m, n;
  // (batch, 4 ceil(m / r), n), r = 64 kSummedSlabs: the four warps' of each r rows; or null.
  float* column_sums;
};

template <class Traits>
class WarpgroupEpilogue {
 public:
  using Element = typename Traits::ElementOut;
  using ElementBias = typename Traits::ElementBias;
  using ElementResidual = typename Traits::ElementResidual;
  using Tile = SubTile<Element>;
  static constexpr int kColumns = Traits::kGated ? Traits::kTileN / 2 : Traits::kTileN;
  static constexpr int kSubTiles = ceil_div(kColumns, Tile::kColumns);
  static constexpr int kAccumulators = Traits::kTileN / 2;
  static constexpr int kFactor = kColumns / 2;  // register of u's first column
  static constexpr bool kTransposed = Traits::kTransposed;
  using ColumnSums = WarpColumnSums<8 * (Tile::block(0, 1) - Tile::block(0, 0))>;
  using Place = PairPlace<kTransposed>;
  static constexpr int kBoxes = kTransposed ? Tile::kTransposedBoxes : 1;
  // Columns of the result in this warpgroup's part of a tile, that it needs the bias of.
  static constexpr int kBiasColumns = kTransposed ? 64 * Traits::kSlabs : Traits::kTileN;
  static constexpr int kBiasPerThread = ceil_div(kBiasColumns, kWarpgroupSize);
  static constexpr int kTileSubTiles = Traits::kSlabs * kSubTiles;
  // Whether the residual is copied into the buffers: its boxes must be the result's, and
  // take turns with nothing else. z would be staged in between, and blocks that share a
  // tile store a part of its sub-tiles. (Transposed products, TF32 alone, are not worth it.)
  static constexpr bool kMapsResidual =
      Traits::kHasResidual && Traits::kMapsResults && !kTransposed &&
      Traits::kClusterK == 1 && !Traits::kSavesPreactivation &&
      sizeof(ElementResidual) == sizeof(Element);
  static constexpr int kResidualCopies = kMapsResidual ? kTileSubTiles : 0;
  static constexpr bool kAddsBias =
      Traits::kHasBias || Traits::kSavesPreactivation ||
      (Traits::kHasResidual && !kMapsResidual && !Traits::kDifferentiates);
  static constexpr int kSummedSlabs = Traits::kSummedSlabs;  // that a warp sums together
  static_assert(kColumns >= Tile::kColumns, "a sub-tile must fit into the tile");
  static_assert(!Traits::kGated || kColumns % Tile::kColumns == 0,
                "sub-tiles of a gated product do not overlap");
  static_assert(!Traits::kGated || !(Traits::kHasBias || Traits::kHasResidual),
                "a gated product has neither bias nor residual");
  static_assert(!(Traits::kGated && kTransposed), "gated products are not transposed");
  static_assert(!Traits::kDifferentiates || (Traits::kHasResidual && !Traits::kHasBias),
                "a derivative is taken at its residual, of a product without a bias");
  static_assert(!Traits::kSumsColumns || (Traits::kDifferentiates && !kTransposed),
                "columns are summed of derivatives, where lanes hold whole columns");
  static_assert(kSummedSlabs == 1 ||
                    (Traits::kSlabs % kSummedSlabs == 0 && Traits::kClusterK == 1),
                "slabs are summed together if the consumer has all of them");
  static_assert(Traits::kMapsResidual == kMapsResidual,
                "the residual has a tensor map exactly where it is copied into buffers");
  static_assert(Traits::kEpilogueBuffers >= 2, "one barrier a step needs two buffers");

  // `buffers`, `bias` and `barriers`, one for each copy of a residual, are shared-memory
  // addresses of this warpgroup's own space.
  TRACEA_DEVICE WarpgroupEpilogue(const EpilogueParams<Traits>& params, u32 buffers, u32 bias,
                                  u32 barriers, int warpgroup)
      : params_(params),
        buffers_(buffers),
        smem_bias_(bias),
        barriers_(barriers),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupSize),
        leader_(warp_uniform(thread_ / kWarpSize) == 0 && elect_one()) {}

  // Starts the loads that the tile at (m, n) of `batch` will need, ahead of its mainloop.
  TRACEA_DEVICE void prefetch(int m, int n, int batch) {
    if constexpr (kAddsBias) load_bias(kTransposed ? m : n, batch);
    if constexpr (kPrefetchesResidual) load_residual(m, n, batch, 0);
    if constexpr (kMapsResidual) {
      if (leader_) cp_async_bulk_wait_group_read<1>();
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kEpilogueBuffers - 1; ++i) copy_residual(m, n, batch, i, i);
    }
  }

  // Finishes and stores the rows m .. m + 64 kSlabs - 1, columns n .. n + kColumns - 1.
  TRACEA_DEVICE void store(float (&accumulators)[Traits::kSlabs][kAccumulators], int m, int n,
                           int batch) {
    if constexpr (kMapsResidual) copy_next_residual(m, n, batch, 0);
    if constexpr (kAddsBias) share_bias();
    TRACEA_UNROLL
    for (int index = 0; index < kTileSubTiles; ++index) {
      store_sub_tile(accumulators[slab_of(index)], m, n, batch, index, false);
    }
    residual_parity_ ^= 1;
  }

  // The same; if the tile is shared, for the sub-tiles that are this block's share of sums
  // over the cluster.
  template <class Exchange>
  TRACEA_DEVICE void store_shares(float (&accumulators)[Traits::kSlabs][kAccumulators], int m,
                                  int n, int batch, const Exchange& exchange,
                                  bool is_shared) {
    constexpr int kRegisters = Tile::kColumns / 2;
    if constexpr (kAddsBias) share_bias();
    TRACEA_UNROLL
    for (int index = 0; index < kTileSubTiles; ++index) {
      const int slab = slab_of(index), first = first_column(sub_tile_of(index)) / 2;
      if (is_shared) {
        if (!exchange.owns(index)) continue;
        exchange.gather(accumulators[slab], slab, first, kRegisters);
        if constexpr (Traits::kGated) {
          exchange.gather(accumulators[slab], slab, kFactor + first, kRegisters);
        }
      }
      store_sub_tile(accumulators[slab], m, n, batch, index, is_shared);
    }
  }

  // Shared memory may be given up after this.
  TRACEA_DEVICE void drain() {
    if (Traits::kMapsResults && leader_) cp_async_bulk_wait_group_read<0>();
  }

 private:
  // The residual of a sub-tile is fetched as soon as that of the one before is used: if they
  // follow each other, and loads of whole pairs leave enough registers.
  static constexpr bool kPrefetchesResidual = Traits::kHasResidual && !kMapsResidual &&
                                              Traits::kClusterK == 1 && Traits::kMapsResults;

  // Where a sub-tile begins in the result.
  struct Corner {
    int row, column;
  };

  // The first column of a sub-tile. If they do not divide the tile, the last one overlaps
  // its neighbour, and both store the same there.
  static constexpr int first_column(int sub) {
    constexpr int kLast = kColumns - Tile::kColumns;
    return sub * Tile::kColumns < kLast ? sub * Tile::kColumns : kLast;
  }

  // Sub-tiles are counted along n first; or, where slabs are summed together, down the slabs
  // first, so that only the sums of one sub-tile's columns wait in registers.
  static constexpr bool kGoesDown = Traits::kSumsColumns && kSummedSlabs > 1;
  static constexpr int slab_of(int index) {
    return kGoesDown ? index % Traits::kSlabs : index / kSubTiles;
  }
  static constexpr int sub_tile_of(int index) {
    return kGoesDown ? index / Traits::kSlabs : index % kSubTiles;
  }

  // Whether a sub-tile is written together with the next one: if that is staged right after
  // it, on its right.
  static constexpr bool kWritesPairs = !Traits::kMapsResults && !kTransposed && !kGoesDown &&
                                       Traits::kClusterK == 1 &&
                                       !Traits::kSavesPreactivation;
  static constexpr bool is_left(int sub) {
    return kWritesPairs && sub % 2 == 0 && sub + 1 < kSubTiles &&
           first_column(sub + 1) == first_column(sub) + Tile::kColumns;
  }
  static constexpr bool is_right(int sub) { return sub % 2 == 1 && is_left(sub - 1); }

  // Where sub-tile `index` of the rows from m on, columns from n on, begins.
  TRACEA_DEVICE static Corner corner(int m, int n, int index) {
    const int row = m + slab_of(index) * Tile::kRows;
    const int column = n + first_column(sub_tile_of(index));
    return kTransposed ? Corner{column, row} : Corner{row, column};
  }

  // Sub-tile `index` of the consumer's rows. `is_gathered` says that its sums are new: its
  // neighbour has not added the bias to those they share.
  TRACEA_DEVICE void store_sub_tile(float (&accumulators)[kAccumulators], int m, int n,
                                    int batch, int index, bool is_gathered) {
    const int sub = sub_tile_of(index);
    const Corner at = corner(m, n, index);
    if constexpr (kAddsBias) add_bias(accumulators, index, is_gathered);
    if constexpr (Traits::kSumsColumns) clear_past_edge(accumulators, sub, at);
    if constexpr (Traits::kSavesPreactivation) {
      stage_all<Activation::kNone, false>(accumulators, index, at, batch);
      publish(params_.preactivation, at, batch);
      if constexpr (Traits::kGated) {
        stage_all<Activation::kNone, false, kFactor>(accumulators, index, at, batch);
        publish(params_.factor, at, batch);
      }
    }
    if constexpr (kMapsResidual) {
      wait_for_residual(index);
    } else if constexpr (Traits::kHasResidual && !kPrefetchesResidual) {
      load_residual(m, n, batch, index);
    }
    stage_all<Traits::kActivation, Traits::kHasResidual || Traits::kGated>(
        accumulators, index, at, batch);
    if constexpr (kMapsResidual) {
      if (index > 0) copy_next_residual(m, n, batch, index);
    } else if constexpr (kPrefetchesResidual) {
      if (index + 1 < kTileSubTiles) load_residual(m, n, batch, index + 1);
    }
    if (is_left(sub)) {
      left_ = buffers_ + buffer_idx_ * Tile::kBytes;
      next_buffer();
    } else {
      publish(params_.out, at, batch, is_right(sub));
    }
  }

  // Each thread fetches a column or two of the result; all threads will need all of them.
  TRACEA_DEVICE void load_bias(int n, int batch) {
    const u64 first = Traits::kBiasIsBatched ? static_cast<u64>(batch) * params_.n : 0;
    const ElementBias* bias = static_cast<const ElementBias*>(params_.bias) + first;
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      const bool inside =
          Traits::kHasBias && column < kBiasColumns && n + column < params_.n;
      bias_[i] = inside ? widen(bias[n + column]) : 0.0f;
    }
  }

  TRACEA_DEVICE void share_bias() {
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      if (column < kBiasColumns) st_shared(smem_bias_ + 4 * column, bias_[i]);
    }
    warpgroup_barrier(warpgroup_);
  }

  // Copies sub-tile `index` of the residual, if there is one, into the buffer that is
  // `ahead` of the one whose turn it is, and which has been read.
  TRACEA_DEVICE void copy_residual(int m, int n, int batch, int index, int ahead) {
    if (index < kTileSubTiles && leader_) {
      const int last = Traits::kEpilogueBuffers - ahead;
      const int buffer_idx = buffer_idx_ + (buffer_idx_ < last ? ahead : -last);
      const Corner at = corner(m, n, index);
      const u32 barrier = barriers_ + 8 * index;
      mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
      cp_async_bulk_tensor_3d(buffers_ + buffer_idx * Tile::kBytes, params_.residual,
                              at.column, at.row, batch, barrier);
    }
  }

  // In step `index`, copies into the buffer of the step before.
  TRACEA_DEVICE void copy_next_residual(int m, int n, int batch, int index) {
    constexpr int kAhead = Traits::kEpilogueBuffers - 1;
    if (index + kAhead < kTileSubTiles) {
      if (leader_) cp_async_bulk_wait_group_read<0>();
      copy_residual(m, n, batch, index + kAhead, kAhead);
    }
  }

  TRACEA_DEVICE void wait_for_residual(int index) const {
    while (!mbarrier_try_wait_parity(barriers_ + 8 * index, residual_parity_)) {
    }
  }

  // What this thread has of a chunk of the residual, from the buffer or from registers.
  TRACEA_DEVICE Chunk<ElementResidual> residual_chunk(u32 buffer, int chunk) const {
    Chunk<ElementResidual> c;
    if constexpr (kMapsResidual) {
      unstage<typename Traits::Swizzle>(buffer, thread_, chunk, c);
    } else {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c.pairs[i / 2][i % 2] = residual_[Tile::block(chunk, i / 2)][i % 2];
      }
    }
    return c;
  }

  // Sub-tile `index` of the residual.
  TRACEA_DEVICE void load_residual(int m, int n, int batch, int index) {
    const Corner at = corner(m, n, index);
    const int column = at.column + Place::col(thread_, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + Place::row(thread_, 0, half);
      const u64 first = (static_cast<u64>(batch) * params_.m + row) * params_.n + column;
      const ElementResidual* residual =
          static_cast<const ElementResidual*>(params_.residual) + first;
      if constexpr (kTransposed) {
        load_residual_column<0>(residual, params_.m - row, params_.n - column, half);
      } else {
        load_residual_row<0>(residual, row < params_.m ? params_.n - column : 0, half);
      }
    }
  }

  // The pairs of this thread in one row; `count` elements of the row are left.
  template <int kBlock>
  TRACEA_DEVICE void load_residual_row(const ElementResidual* row, int count, int half) {
    if constexpr (kBlock < Tile::kBlocks) {
      residual_[kBlock][half] = load_pair<8 * kBlock>(row, count);
      load_residual_row<kBlock + 1>(row, count, half);
    }
  }

  // Its pairs in every eighth row; `rows` rows are left, and `count` elements in each. Each
  // address is made of the one before, opaquely: all at once they would take the registers.
  template <int kBlock>
  TRACEA_DEVICE void load_residual_column(const ElementResidual* row, int rows, int count,
                                          int half) {
    if constexpr (kBlock < Tile::kBlocks) {
      int left = 8 * kBlock < rows ? count : 0;
      asm volatile("" : "+l"(row), "+r"(left));
      residual_[kBlock][half] = load_pair<0>(row, left);
      const u64 distance = 8 * static_cast<u64>(params_.n);
      load_residual_column<kBlock + 1>(row + distance, rows, count, half);
    }
  }

  template <int kOffset>
  TRACEA_DEVICE static Packed<ElementResidual> load_pair(const ElementResidual* row,
                                                         int count) {
    if constexpr (Traits::kMapsResults) {
      return load_pair_before<kOffset>(row, count);
    } else {
      return load_each_before<kOffset>(row, count);
    }
  }

  // z, in place: it is both a result and the argument of the activation.
  TRACEA_DEVICE void add_bias(float (&accumulators)[kAccumulators], int index,
                              bool is_gathered) {
    const int sub = sub_tile_of(index), column = corner(0, 0, index).column;
    Pair bias;
    TRACEA_UNROLL
    for (int block = 0; block < Tile::kBlocks; ++block) {
      // The blocks of a transposed product are rows of the same columns.
      if (!kTransposed || block == 0) {
        bias = ld_shared_pair(smem_bias_ + 4 * (column + Place::col(thread_, block)));
      }
      const int first = first_column(sub) + 8 * block;
      if (first < sub * Tile::kColumns && !is_gathered) continue;
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = Place::first_register(first / 8, half);
        accumulators[i] += bias.x;
        accumulators[i + Place::kNext] += bias.y;
      }
    }
  }

  // Rows past the edge are 0 times an operand that may be inf or NaN; there the derivative is
  // finite, at a residual of 0.
  TRACEA_DEVICE void clear_past_edge(float (&accumulators)[kAccumulators], int sub,
                                     const Corner& at) const {
    if (at.row + Tile::kRows <= params_.m) return;  // rare, and alike in all threads
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (at.row + Place::row(thread_, 0, half) < params_.m) continue;
      TRACEA_UNROLL
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const int i = Place::first_register(first_column(sub) / 8 + block, half);
        accumulators[i] = accumulators[i + Place::kNext] = 0.0f;
      }
    }
  }

  // Rounds a sub-tile of the result, or of z, into the buffer whose turn it is. kFirst is
  // the register of the first column.
  template <Activation kActivation, bool kJoins, int kFirst = 0>
  TRACEA_DEVICE void stage_all(const float (&accumulators)[kAccumulators], int index,
                               const Corner& at, int batch) {
    const int sub = sub_tile_of(index), slab = slab_of(index) % kSummedSlabs;
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    const ColumnSums sums = column_sums(at, slab, batch);  // nothing, unless it is used
    constexpr bool kJoinsResidual = kJoins && Traits::kHasResidual;
    Chunk<ElementResidual> next;  // read while the chunk before is computed
    if constexpr (kJoinsResidual) next = residual_chunk(buffer, 0);
    TRACEA_UNROLL
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const Chunk<ElementResidual> residual = next;
      if constexpr (kJoinsResidual) {
        if (chunk + 1 < Tile::kChunks) next = residual_chunk(buffer, chunk + 1);
      }
      Pair wide[2][2];  // [block][half] before they are rounded
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int which = i / 2, half = i % 2, block = Tile::block(chunk, which);
        const float* z = accumulators + kFirst +
                         Place::first_register(first_column(sub) / 8 + block, half);
        Pair& y = wide[which][half];
        if constexpr (kJoins && Traits::kDifferentiates) {
          const Pair at = residual.pairs[which][half].widen();
          y = {differentiate<kActivation>(at.x, z[0]),
               differentiate<kActivation>(at.y, z[Place::kNext])};
        } else {
          y = {activate<kActivation>(z[0]), activate<kActivation>(z[Place::kNext])};
        }
        if constexpr (kJoins && Traits::kGated) {
          y = join<true>(y, {z[kFactor], z[kFactor + 1]});
        } else if constexpr (kJoins && !Traits::kDifferentiates) {
          y = join<Traits::kMultipliesResidual>(y, residual.pairs[which][half].widen());
        }
      }
      if constexpr (kJoins && Traits::kSumsColumns) {
        sum_columns(wide, slab, chunk, sums);
      }
      Chunk<Element> c;
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        c.pairs[i / 2][i % 2] = Packed<Element>::from(wide[i / 2][i % 2]);
      }
      if constexpr (kTransposed) {
        stage_transposed<typename Traits::Swizzle>(buffer, thread_, chunk, c);
      } else {
        stage<typename Traits::Swizzle>(buffer, thread_, chunk, c);
      }
    }
  }

  // Adds this thread's rows of a chunk to those of the slabs before, and after the last of
  // them the warp's rows to each other.
  TRACEA_DEVICE void sum_columns(const Pair (&y)[2][2], int slab, int chunk,
                                 const ColumnSums& sums) {
    Pair total[2];
    TRACEA_UNROLL
    for (int i = 0; i < 2; ++i) {
      Pair& before = summed_[Tile::block(chunk, i)];
      total[i] = add(y[i][0], y[i][1]);
      if (slab > 0) total[i] = add(before, total[i]);
      before = total[i];
    }
    const int column = 8 * Tile::block(chunk, 0);
    if (slab == kSummedSlabs - 1) sums.store(column, total[0], total[1]);
  }

  // Where this warp leaves the sums that end in this slab, from the corner's column on.
  TRACEA_DEVICE ColumnSums column_sums(const Corner& at, int slab, int batch) const {
    constexpr int kRows = kSummedSlabs * Tile::kRows, kWarps = kWarpgroupSize / kWarpSize;
    const int first = at.row - slab * Tile::kRows, warp = thread_ / kWarpSize;
    const u64 group = static_cast<u64>(batch) * ceil_div(params_.m, kRows) + first / kRows;
    return ColumnSums(
        params_.column_sums + (group * kWarps + warp) * params_.n + at.column,
        first < params_.m ? params_.n - at.column : 0, thread_ % kWarpSize);
  }

  // Sends the staged buffer on its way; the next one is free to stage into. With the buffer
  // that waits on its left, if there is one, it shares rows.
  TRACEA_DEVICE void publish(typename EpilogueParams<Traits>::Result result,
                             const Corner& at, int batch, bool has_left = false) {
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    if constexpr (Traits::kMapsResults) {
      fence_proxy_async_shared();
      if (leader_) cp_async_bulk_wait_group_read<Traits::kEpilogueBuffers - 2>();
      warpgroup_barrier(warpgroup_);
      if (leader_) {
        TRACEA_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          cp_async_bulk_tensor_3d_store(result, buffer + box * (Tile::kBytes / kBoxes),
                                        at.column + box * Tile::kColumns, at.row, batch);
        }
        cp_async_bulk_commit_group();
      }
    } else {
      // Rows of the transposed product are staged by several warps.
      if constexpr (kTransposed) warpgroup_barrier(warpgroup_);
      Element* out = static_cast<Element*>(result);
      if (has_left) {
        write_rows<2>(out, left_, buffer, {at.row, at.column - Tile::kColumns}, batch);
      } else {
        write_rows<1>(out, buffer, buffer, at, batch);
      }
    }
    next_buffer();
  }

  TRACEA_DEVICE void next_buffer() {
    buffer_idx_ = buffer_idx_ + 1 == Traits::kEpilogueBuffers ? 0 : buffer_idx_ + 1;
  }

  // Writes this warp's 16 rows of one or two staged sub-tiles, the first of which begins at
  // the corner.
  template <int kWidth>
  TRACEA_DEVICE void write_rows(Element* result, u32 left, u32 right, const Corner& at,
                                int batch) const {
    using Rows = StagedRows<typename Traits::Swizzle, Element, kWidth>;
    constexpr int kBoxRows = Tile::kRows / kBoxes;
    const int first = thread_ / kWarpSize * Rows::kWarpRows;
    const int row = at.row + first % kBoxRows;
    const int column = at.column + first / kBoxRows * Tile::kColumns;
    const u64 start = (static_cast<u64>(batch) * params_.m + row) * params_.n;
    const Rows staged{left, right, first, params_.m - row, params_.n - column};
    __syncwarp();
    staged.write(result + start + column, params_.n, thread_ % kWarpSize);
    __syncwarp();
  }

  const EpilogueParams<Traits>& params_;
  const u32 buffers_, smem_bias_, barriers_;
  const int warpgroup_, thread_;
  const bool leader_;
  int buffer_idx_ = 0;
  u32 left_ = 0;  // the buffer that waits for its neighbour
  u32 residual_parity_ = 0;  // of the copies of this tile
  float bias_[kBiasPerThread];
  // Of the sub-tile that is next, unless it is copied into a buffer.
  Packed<ElementResidual> residual_[Tile::kBlocks][2];
  Pair summed_[Tile::kBlocks];  // this thread's columns of a sub-tile, of the slabs before
};

}  // namespace tracea
