// What happens to a warpgroup's accumulators: z = acc + bias, y = activation(z) + residual
// (or times residual), one rounding, and a store through shared memory that runs on while
// the next tile starts. Of a gated product y = activation(g) * u, the accumulators are
// those of g and then, as many columns, those of u. Of a derivative the residual is the z of
// an earlier product: y = activation'(residual) acc. It may also leave the sums of the
// columns of y before it is rounded.
//
//   epilogue_tiles.cuh      what is given, and the sub-tiles that a slab leaves in
//   epilogue_bias.cuh       the bias
//   epilogue_residual.cuh   the residual
//   epilogue_sums.cuh       the sums of columns
//   here                    staging and storing, sub-tile by sub-tile
//
// Sub-tiles take turns in a ring of buffers that belongs to the warpgroup alone:
//
//   step j:  stage into buffer j | fence | leader: buffer j+1 has been read | barrier |
//            leader: store buffer j
//
// One barrier serves both ways: it publishes buffer j and frees buffer j+1.
//
// Rows that are no multiples of 16 bytes have no tensor map. Each warp then writes the rows
// that it staged itself, see staged_rows.cuh. Where it can it waits for a neighbour on the
// right and writes both: of short rows that start anywhere, much is parts of sectors.
//
// Traits: ElementOut, ElementBias, ElementResidual, Swizzle, kTileN, kSlabs, kGated,
// kTransposed, kClusterK, kMapsResults, kMapsResidual, kEpilogueBuffers, kHasBias,
// kBiasIsBatched, kHasResidual, kMultipliesResidual, kDifferentiates, kSumsColumns,
// kSummedSlabs, kSavesPreactivation, kActivation.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/epilogue_bias.cuh"
#include "tile/epilogue_residual.cuh"
#include "tile/epilogue_sums.cuh"
#include "tile/epilogue_tiles.cuh"
#include "tile/staged_rows.cuh"
#include "tile/sub_tile.cuh"

namespace tracea {

template <class Traits>
class WarpgroupEpilogue {
 public:
  using Tiles = EpilogueTiles<Traits>;
  using Bias = EpilogueBias<Traits>;
  using Residual = EpilogueResidual<Traits>;
  using Sums = EpilogueSums<Traits>;
  using Accumulators = float[Tiles::kAccumulators];  // of a slab
  static_assert(!Traits::kGated || !(Traits::kHasBias || Traits::kHasResidual),
                "a gated product has neither bias nor residual");
  static_assert(!Traits::kDifferentiates || (Traits::kHasResidual && !Traits::kHasBias),
                "a derivative is taken at its residual, of a product without a bias");
  static_assert(Traits::kEpilogueBuffers >= 2, "one barrier a step needs two buffers");

  // `buffers`, `bias` and `barriers`, one for each copy of a residual, are shared-memory
  // addresses of this warpgroup's own space.
  TRACEA_DEVICE WarpgroupEpilogue(const EpilogueParams<Traits>& params, u32 buffers, u32 bias,
                                  u32 barriers, int warpgroup)
      : params_(params),
        buffers_(buffers),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupSize),
        leader_(warp_uniform(thread_ / kWarpSize) == 0 && elect_one()),
        bias_(params, bias, warpgroup, thread_),
        residual_(params, buffers, barriers, thread_, leader_),
        sums_(params, thread_) {}

  // Starts the loads that the tile at (m, n) of `batch` will need, ahead of its mainloop.
  TRACEA_DEVICE void prefetch(int m, int n, int batch) {
    if constexpr (kAddsBias) bias_.prefetch(m, n, batch);
    residual_.prefetch(m, n, batch, buffer_idx_);
  }

  // Finishes and stores the rows m .. m + 64 kSlabs - 1, columns n .. n + kColumns - 1.
  TRACEA_DEVICE void store(Accumulators (&accumulators)[Traits::kSlabs], int m, int n,
                           int batch) {
    residual_.begin_tile(m, n, batch, buffer_idx_);
    if constexpr (kAddsBias) bias_.share();
    TRACEA_UNROLL
    for (int index = 0; index < Tiles::kCount; ++index) {
      store_sub_tile(accumulators[Tiles::slab_of(index)], m, n, batch, index, false);
    }
    residual_.end_tile();
  }

  // The same; if the tile is shared, for the sub-tiles that are this block's share of sums
  // over the cluster.
  template <class Exchange>
  TRACEA_DEVICE void store_shares(Accumulators (&accumulators)[Traits::kSlabs], int m, int n,
                                  int batch, const Exchange& exchange, bool is_shared) {
    constexpr int kRegisters = Tile::kColumns / 2;
    if constexpr (kAddsBias) bias_.share();
    TRACEA_UNROLL
    for (int index = 0; index < Tiles::kCount; ++index) {
      const int slab = Tiles::slab_of(index);
      const int first = Tiles::first_column(Tiles::sub_tile_of(index)) / 2;
      if (is_shared) {
        if (!exchange.owns(index)) continue;
        exchange.gather(accumulators[slab], slab, first, kRegisters);
        if constexpr (Traits::kGated) {
          exchange.gather(accumulators[slab], slab, Tiles::kFactor + first, kRegisters);
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
  using Element = typename Traits::ElementOut;
  using ElementResidual = typename Traits::ElementResidual;
  using Tile = typename Tiles::Tile;
  using Place = typename Tiles::Place;
  static constexpr bool kTransposed = Tiles::kTransposed;
  // See epilogue_bias.cuh. A derivative waits for its residual anyway.
  static constexpr bool kAddsBias =
      Traits::kHasBias || Traits::kSavesPreactivation ||
      (Traits::kHasResidual && !Residual::kIsMapped && !Traits::kDifferentiates);

  // Sub-tile `index` of the consumer's rows. `is_gathered`: see EpilogueBias.
  TRACEA_DEVICE void store_sub_tile(Accumulators& accumulators, int m, int n, int batch,
                                    int index, bool is_gathered) {
    const int sub = Tiles::sub_tile_of(index);
    const Corner at = Tiles::corner(m, n, index);
    if constexpr (kAddsBias) bias_.add(accumulators, index, is_gathered);
    if constexpr (Traits::kSumsColumns) sums_.clear_past_edge(accumulators, sub, at);
    if constexpr (Traits::kSavesPreactivation) {
      stage_all<Activation::kNone, false>(accumulators, index, at, batch);
      publish(params_.preactivation, at, batch);
      if constexpr (Traits::kGated) {
        stage_all<Activation::kNone, false, Tiles::kFactor>(accumulators, index, at, batch);
        publish(params_.factor, at, batch);
      }
    }
    residual_.wait(m, n, batch, index);
    stage_all<Traits::kActivation, Traits::kHasResidual || Traits::kGated>(
        accumulators, index, at, batch);
    residual_.advance(m, n, batch, index, buffer_idx_);
    if (Tiles::is_left(sub)) {
      left_ = buffers_ + buffer_idx_ * Tile::kBytes;
      next_buffer();
    } else {
      publish(params_.out, at, batch, Tiles::is_right(sub));
    }
  }

  // Rounds a sub-tile of the result, or of z, into the buffer whose turn it is. kFirst is
  // the register of the first column.
  template <Activation kActivation, bool kJoins, int kFirst = 0>
  TRACEA_DEVICE void stage_all(const Accumulators& accumulators, int index, const Corner& at,
                               int batch) {
    const int sub = Tiles::sub_tile_of(index), slab = Sums::slab_of(index);
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    const auto of_warp = sums_.of_warp(at, slab, batch);  // nothing, unless it is used
    constexpr bool kJoinsResidual = kJoins && Traits::kHasResidual;
    Chunk<ElementResidual> next;  // read while the chunk before is computed
    if constexpr (kJoinsResidual) next = residual_.chunk(buffer, 0);
    TRACEA_UNROLL
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const Chunk<ElementResidual> residual = next;
      if constexpr (kJoinsResidual) {
        if (chunk + 1 < Tile::kChunks) next = residual_.chunk(buffer, chunk + 1);
      }
      Pair wide[2][2];  // [block][half] before they are rounded
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int which = i / 2, half = i % 2, block = Tile::block(chunk, which);
        const float* z = accumulators + kFirst +
                         Place::first_register(Tiles::first_column(sub) / 8 + block, half);
        Pair& y = wide[which][half];
        if constexpr (kJoins && Traits::kDifferentiates) {
          const Pair at = residual.pairs[which][half].widen();
          y = {differentiate<kActivation>(at.x, z[0]),
               differentiate<kActivation>(at.y, z[Place::kNext])};
        } else {
          y = {activate<kActivation>(z[0]), activate<kActivation>(z[Place::kNext])};
        }
        if constexpr (kJoins && Traits::kGated) {
          y = join<true>(y, {z[Tiles::kFactor], z[Tiles::kFactor + 1]});
        } else if constexpr (kJoins && !Traits::kDifferentiates) {
          y = join<Traits::kMultipliesResidual>(y, residual.pairs[which][half].widen());
        }
      }
      if constexpr (kJoins && Traits::kSumsColumns) {
        sums_.add_chunk(wide, slab, chunk, of_warp);
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
        for (int box = 0; box < Tiles::kBoxes; ++box) {
          cp_async_bulk_tensor_3d_store(result, buffer + box * (Tile::kBytes / Tiles::kBoxes),
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
    constexpr int kBoxRows = Tile::kRows / Tiles::kBoxes;
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
  const u32 buffers_;
  const int warpgroup_, thread_;
  const bool leader_;
  Bias bias_;
  Residual residual_;
  Sums sums_;
  int buffer_idx_ = 0;
  u32 left_ = 0;  // the buffer that waits for its neighbour
};

}  // namespace tracea
