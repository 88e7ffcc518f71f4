// What happens to a warpgroup's accumulators of a convolution: z = acc + bias + residual,
// y = activation(z), one rounding, and a store through shared memory. Rows are pixels,
// columns channels.
//
// A 64 x N slab leaves in sub-tiles of 64 rows x 128 bytes, staged in a ring of buffers that
// belongs to the warpgroup alone:
//
//   step j:  stage into buffer j | fence | leader: buffer j+1 has been read | barrier |
//            leader: store buffer j
//
// One barrier serves both ways: it publishes buffer j and frees buffer j+1. It also says
// that the residual of step j has been read: residuals arrive by tensor map in two buffers
// of their own, two steps ahead.
//
// Where the pixels of the result are not neighbours in memory (kScatters), each warp writes
// the rows that it staged itself, 16 bytes a lane, and drops those that are no pixels of the
// result. Which these are its lanes find out before the tile is multiplied, one row each: it
// takes divisions. Residuals of such rows arrive by tensor maps in im2col mode.
//
// Traits: ElementOut, ElementBias, ElementResidual, Swizzle, kTileN, kSlabs, kScatters,
// kEpilogueBuffers, kHasBias, kHasResidual, kSavesPreactivation, kActivation.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/tma_im2col.cuh"
#include "ptx/turns.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/conv_roles.cuh"
#include "tile/fragment.cuh"
#include "tile/sub_tile.cuh"

namespace tracea {

template <class Traits>
struct ConvEpilogueParams {
  const TensorMap* out;            // null if it is scattered
  const TensorMap* preactivation;  // z, null unless it is saved
  const TensorMap* residual;       // or null
  const void* bias;                // (n), or null
  void* scattered[2];              // the result and z, if they are scattered, else null
  int n;                           // channels
  int rows, columns;               // of an image of the scattered result
};

// Where a slab of 64 pixels begins in the result: its pixel in a line, the line, the image.
// Results that are one line of all pixels have neither further lines nor images.
struct ConvCorner {
  int pixel, line, image;
  int row;  // of all rows that are computed
};

// Which pixels a tile is of.
struct ConvRows {
  ConvAxis h, w;
  int count;  // pixels of all images
};

template <class Traits>
class ConvEpilogue {
 public:
  using Element = typename Traits::ElementOut;
  using ElementBias = typename Traits::ElementBias;
  using ElementResidual = typename Traits::ElementResidual;
  using Tile = SubTile<Element>;
  using Place = PairPlace<false>;
  static constexpr int kSubTiles = ceil_div(Traits::kTileN, Tile::kColumns);
  static constexpr int kTileSubTiles = Traits::kSlabs * kSubTiles;
  static constexpr int kAccumulators = Traits::kTileN / 2;
  static constexpr int kBiasPerThread = ceil_div(Traits::kTileN, kWarpgroupSize);
  static constexpr int kResidualBuffers = 2;
  static_assert(Traits::kTileN >= Tile::kColumns, "a sub-tile must fit into the tile");
  static_assert(Traits::kEpilogueBuffers >= 2, "one barrier a step needs two buffers");
  static_assert(!Traits::kHasResidual || sizeof(ElementResidual) == sizeof(Element),
                "residuals come in boxes like the result's");

  // `buffers` are the staging buffers and, behind them, those of the residual, each with
  // one of `barriers`; with `bias` addresses of this warpgroup's own shared memory.
  TRACEA_DEVICE ConvEpilogue(const ConvEpilogueParams<Traits>& params, u32 buffers, u32 bias,
                             u32 barriers, int warpgroup)
      : params_(params),
        buffers_(buffers),
        smem_bias_(bias),
        barriers_(barriers),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupSize),
        leader_(warp_uniform(thread_ / kWarpSize) == 0 && elect_one()) {}

  // Starts the loads that the slabs at corner(slab) will need, columns from n on.
  template <class Corner>
  TRACEA_DEVICE void prefetch(Corner&& corner, int n, const ConvRows& rows) {
    if constexpr (Traits::kHasBias) load_bias(n);
    if constexpr (Traits::kScatters) {
      TRACEA_UNROLL
      for (int slab = 0; slab < Traits::kSlabs; ++slab) {
        pixels_[slab] = pixel_of(corner(slab).row + first_row() + thread_ % 16, rows);
      }
    }
    if constexpr (Traits::kHasResidual) {
      TRACEA_UNROLL
      for (int i = 0; i < kResidualBuffers && i < kTileSubTiles; ++i) {
        copy_residual(corner(i / kSubTiles), n, i);
      }
    }
  }

  // Finishes and stores the slabs at corner(slab), columns n .. n + kTileN - 1.
  template <class Corner>
  TRACEA_DEVICE void store(const float (&accumulators)[Traits::kSlabs][kAccumulators],
                           Corner&& corner, int n) {
    if constexpr (Traits::kHasBias) share_bias();
    TRACEA_UNROLL
    for (int index = 0; index < kTileSubTiles; ++index) {
      const float(&sums)[kAccumulators] = accumulators[index / kSubTiles];
      const ConvCorner at = corner(index / kSubTiles);
      const int sub = index % kSubTiles, column = n + first_column(sub);
      if constexpr (Traits::kHasResidual) wait_for_residual();
      if constexpr (Traits::kSavesPreactivation) {
        stage_all<Activation::kNone>(sums, sub);
        if constexpr (Traits::kScatters) {
          scatter(params_.scattered[1], pixels_[index / kSubTiles], column);
        } else {
          publish(params_.preactivation, at, column);
        }
      }
      stage_all<Traits::kActivation>(sums, sub);
      if constexpr (Traits::kScatters) {
        scatter(params_.scattered[0], pixels_[index / kSubTiles], column);
      } else {
        publish(params_.out, at, column);
      }
      if constexpr (Traits::kHasResidual) {
        // Warps that write their own rows have not met since they read the residual.
        if constexpr (Traits::kScatters) meet_warpgroup(warpgroup_);
        ++residual_idx_;
        if (index + kResidualBuffers < kTileSubTiles) {
          const int next = index + kResidualBuffers;
          copy_residual(corner(next / kSubTiles), n, next);
        }
      }
    }
  }

  // Shared memory may be given up after this.
  TRACEA_DEVICE void drain() {
    if (!Traits::kScatters && leader_) cp_async_bulk_wait_group_read<0>();
  }

 private:
  // The first column of a sub-tile. If they do not divide the tile, the last one overlaps
  // its neighbour, and both store the same there.
  static constexpr int first_column(int sub) {
    constexpr int kLast = Traits::kTileN - Tile::kColumns;
    return sub * Tile::kColumns < kLast ? sub * Tile::kColumns : kLast;
  }

  // Each thread fetches a column or two; all threads will need all of them.
  TRACEA_DEVICE void load_bias(int n) {
    const ElementBias* bias = static_cast<const ElementBias*>(params_.bias);
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      const bool inside = column < Traits::kTileN && n + column < params_.n;
      bias_[i] = inside ? widen(bias[n + column]) : 0.0f;
    }
  }

  TRACEA_DEVICE void share_bias() {
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      if (column < Traits::kTileN) st_shared(smem_bias_ + 4 * column, bias_[i]);
    }
    meet_warpgroup(warpgroup_);
  }

  // Residuals are copied and read in turn, in two buffers, whose barriers complete a phase
  // each time.
  TRACEA_DEVICE u32 residual_buffer(u32 i) const {
    return buffers_ + (Traits::kEpilogueBuffers + i % kResidualBuffers) * Tile::kBytes;
  }

  // Sub-tile `index` of a tile, into the buffer of the sub-tile two before, which has been
  // read.
  TRACEA_DEVICE void copy_residual(const ConvCorner& at, int n, int index) {
    const u32 turn = copied_idx_++;
    if (!leader_) return;
    const u32 barrier = barriers_ + 8 * (turn % kResidualBuffers);
    mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
    const u32 buffer = residual_buffer(turn);
    const int column = n + first_column(index % kSubTiles);
    if constexpr (Traits::kScatters) {
      cp_async_bulk_tensor_4d_im2col(buffer, params_.residual, column, at.pixel, at.line,
                                     at.image, 0, 0, barrier);
    } else {
      cp_async_bulk_tensor_4d(buffer, params_.residual, column, at.pixel, at.line, at.image,
                              barrier);
    }
  }

  TRACEA_DEVICE void wait_for_residual() const {
    const u32 barrier = barriers_ + 8 * (residual_idx_ % kResidualBuffers);
    wait_parity(barrier, residual_idx_ / kResidualBuffers & 1u);
  }

  // Rounds activation(z) of a sub-tile into the buffer whose turn it is.
  template <Activation kActivation>
  TRACEA_DEVICE void stage_all(const float (&sums)[kAccumulators], int sub) {
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    TRACEA_UNROLL
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      Chunk<ElementResidual> residual;
      if constexpr (Traits::kHasResidual) {
        unstage<typename Traits::Swizzle>(residual_buffer(residual_idx_), thread_, chunk,
                                          residual);
      }
      Chunk<Element> c;
      TRACEA_UNROLL
      for (int which = 0; which < 2; ++which) {
        const int column = first_column(sub) + 8 * Tile::block(chunk, which);
        Pair bias{0.0f, 0.0f};
        if constexpr (Traits::kHasBias) {
          bias = ld_shared_pair(smem_bias_ + 4 * (column + Place::col(thread_, 0)));
        }
        TRACEA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int i = Place::first_register(column / 8, half);
          Pair z{sums[i] + bias.x, sums[i + 1] + bias.y};
          if constexpr (Traits::kHasResidual) {
            const Pair added = residual.pairs[which][half].widen();
            z = {z.x + added.x, z.y + added.y};
          }
          c.pairs[which][half] =
              Packed<Element>::from({activate<kActivation>(z.x), activate<kActivation>(z.y)});
        }
      }
      stage<typename Traits::Swizzle>(buffer, thread_, chunk, c);
    }
  }

  // Sends the staged buffer on its way; the next one is free to stage into.
  TRACEA_DEVICE void publish(const TensorMap* result, const ConvCorner& at, int column) {
    fence_proxy_async_shared();
    if (leader_) cp_async_bulk_wait_group_read<Traits::kEpilogueBuffers - 2>();
    meet_warpgroup(warpgroup_);
    if (leader_) {
      const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
      cp_async_bulk_tensor_4d_store(result, buffer, column, at.pixel, at.line, at.image);
      cp_async_bulk_commit_group();
    }
    next_buffer();
  }

  // The first of this warp's 16 rows of a slab.
  TRACEA_DEVICE int first_row() const { return thread_ / kWarpSize * 16; }

  // The pixel of the result that row m of all rows is, or none: -1.
  TRACEA_DEVICE int pixel_of(int m, const ConvRows& rows) const {
    const Pixel at = Pixel::at(m, rows.h.extent, rows.w.extent);
    const int y = rows.h.out(at.row), x = rows.w.out(at.column);
    const bool exists = m < rows.count && y < params_.rows && x < params_.columns;
    return exists ? (at.image * params_.rows + y) * params_.columns + x : -1;
  }

  // Writes this warp's 16 rows of the staged buffer, each to the place of its pixel, which a
  // lane of the warp knows.
  TRACEA_DEVICE void scatter(void* result, int known_pixel, int n) {
    constexpr int kLanes = Tile::kRowBytes / 16, kUnit = 16 / sizeof(Element);
    constexpr int kRowsAtOnce = kWarpSize / kLanes;
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    const int lane = thread_ % kWarpSize, unit = lane % kLanes;
    const int column = n + unit * kUnit;
    Element* const first = static_cast<Element*>(result) + column;
    __syncwarp();
    TRACEA_UNROLL
    for (int i = 0; i < 16; i += kRowsAtOnce) {
      const int row = i + lane / kLanes;
      const int pixel = __shfl_sync(0xFFFFFFFFu, known_pixel, row);
      const Words words = ld_shared_words(
          buffer +
          Traits::Swizzle::apply(Tile::kRowBytes * (first_row() + row) + 16 * unit));
      if (pixel >= 0 && column < params_.n) {
        *reinterpret_cast<Words*>(first + static_cast<i64>(pixel) * params_.n) = words;
      }
    }
    __syncwarp();
    next_buffer();
  }

  TRACEA_DEVICE void next_buffer() {
    buffer_idx_ = buffer_idx_ + 1 == Traits::kEpilogueBuffers ? 0 : buffer_idx_ + 1;
  }

  const ConvEpilogueParams<Traits>& params_;
  const u32 buffers_, smem_bias_, barriers_;
  const int warpgroup_, thread_;
  const bool leader_;
  int buffer_idx_ = 0;
  u32 copied_idx_ = 0, residual_idx_ = 0;  // residuals copied and read so far
  int pixels_[Traits::kSlabs];             // of a row of each slab, if they are scattered
  float bias_[kBiasPerThread];
};

// What consumers have in shared memory beside their buffers: the last of a block's, as no
// swizzle needs it aligned.
template <class Traits>
struct ConvFinishShared {
  alignas(16) float bias[Traits::kConsumers][Traits::kTileN];
  u64 residual_barriers[Traits::kConsumers][2];
  u64 turn_barriers[Traits::kConsumers];  // that a consumer has multiplied its tile

  // One thread, before a fence and a barrier of the block.
  TRACEA_DEVICE void initialize() {
    TRACEA_UNROLL
    for (int i = 0; i < Traits::kConsumers; ++i) {
      mbarrier_init(shared_address(&turn_barriers[i]), 1);
      TRACEA_UNROLL
      for (u64& barrier : residual_barriers[i]) mbarrier_init(shared_address(&barrier), 1);
    }
  }

  TRACEA_DEVICE ConvEpilogue<Traits> epilogue(const ConvEpilogueParams<Traits>& params,
                                              const u8 (&buffers)[Traits::kBuffers][64 * 128],
                                              int consumer) const {
    return {params, shared_address(buffers), shared_address(bias[consumer]),
            shared_address(residual_barriers[consumer]), consumer};
  }

  // Two consumers multiply in turns: waits for the other's tile before this one.
  TRACEA_DEVICE void wait_turn(int consumer, u32 tile) const {
    wait_parity(shared_address(&turn_barriers[1 - consumer]), turn_parity(tile));
  }
  TRACEA_DEVICE void end_turn(int consumer, int thread) const {
    if (thread == 0) mbarrier_arrive(shared_address(&turn_barriers[consumer]));
  }
};

}  // namespace tracea
