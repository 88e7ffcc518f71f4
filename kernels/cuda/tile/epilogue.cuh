// What happens to a warpgroup's accumulators: z = acc + bias, y = activation(z) + residual
// (or times residual), one rounding, and a store through shared memory that runs on while the next tile starts.
//
// A 64 x N slab leaves in sub-tiles of 64 rows x 128 bytes, the widest box of a swizzled
// tensor map. They take turns in a ring of buffers that belongs to the warpgroup alone:
//
//   step j:  stage into buffer j | fence | leader: buffer j+1 has been read | barrier |
//            leader: store buffer j
//
// One barrier serves both ways: it publishes buffer j and frees buffer j+1.
// Traits: ElementOut, ElementBias, ElementResidual, Swizzle, kTileN, kSlabs,
// kEpilogueBuffers, kHasBias, kBiasIsBatched, kHasResidual, kMultipliesResidual,
// kSavesPreactivation, kActivation. Rows of the results are multiples of 16 bytes.
//
// Zeros are added where there is no bias but a residual or a second result. They come from
// shared memory after a barrier, which keeps the compiler from starting on all sub-tiles at
// once and running out of registers.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"

namespace tracea {

struct EpilogueParams {
  const TensorMap* out;
  const TensorMap* preactivation;  // null unless it is saved
  const void* bias;                // (n) or (batch, n), or null
  const void* residual;            // (batch, m, n), or null
  int m, n;
};

// A sub-tile and its chunks: two blocks of 8 columns that a warpgroup stages together.
template <class Element>
struct SubTile {
  static constexpr int kRows = 64;
  static constexpr int kRowBytes = 128;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kBlocks = kColumns / 8;
  static constexpr int kChunks = kBlocks / 2;

  // The blocks of a chunk: neighbours for stmatrix, two apart for staggered f32 stores.
  static constexpr int block(int chunk, int i) {
    return sizeof(Element) == 2 ? 2 * chunk + i : chunk + 2 * i;
  }
};

// What a thread holds of a chunk: [block][upper or lower 8 rows of the warp's 16].
template <class Element>
struct Chunk {
  Packed<Element> pairs[2][2];
};

// Writes a chunk of 16-bit elements to its swizzled place in a sub-tile.
template <class Swizzle, class Element>
TRACEA_DEVICE void stage(u32 buffer, int thread, int chunk, const Chunk<Element>& c) {
  const u32 byte =
      stmatrix_x4_byte<Swizzle>(thread, SubTile<Element>::block(chunk, 0));
  stmatrix_x4(buffer + byte, c.pairs[0][0].bits, c.pairs[0][1].bits, c.pairs[1][0].bits,
              c.pairs[1][1].bits);
}

// The same for f32. Odd rows take the two blocks in the other order, to keep off the banks
// of their even neighbours.
template <class Swizzle>
TRACEA_DEVICE void stage(u32 buffer, int thread, int chunk, const Chunk<float>& c) {
  TRACEA_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int straight = SubTile<float>::block(chunk, i);
    const bool keeps_order = staggered_block(thread, straight) == straight;
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const u32 byte = accumulator_pair_byte<Swizzle>(thread, straight, half);
      const Pair kept = c.pairs[i][half].value, crossed = c.pairs[1 - i][half].value;
      st_shared(buffer + byte, keeps_order ? kept : crossed);
    }
  }
}

template <class Traits>
class WarpgroupEpilogue {
 public:
  using Element = typename Traits::ElementOut;
  using ElementBias = typename Traits::ElementBias;
  using ElementResidual = typename Traits::ElementResidual;
  using Tile = SubTile<Element>;
  static constexpr int kSubTiles = Traits::kTileN / Tile::kColumns;
  static constexpr int kAccumulators = Traits::kTileN / 2;
  static constexpr int kBiasPerThread = ceil_div(Traits::kTileN, kWarpgroupSize);
  static constexpr bool kAddsBias =
      Traits::kHasBias || Traits::kHasResidual || Traits::kSavesPreactivation;
  static_assert(Traits::kTileN % Tile::kColumns == 0, "sub-tiles must fill the tile");
  static_assert(Traits::kEpilogueBuffers >= 2, "one barrier a step needs two buffers");

  // `buffers` and `bias` are shared-memory addresses of this warpgroup's own space.
  TRACEA_DEVICE WarpgroupEpilogue(const EpilogueParams& params, u32 buffers, u32 bias,
                                  int warpgroup)
      : params_(params),
        buffers_(buffers),
        smem_bias_(bias),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupSize),
        leader_(warp_uniform(thread_ / kWarpSize) == 0 && elect_one()) {}

  // Starts the loads that the tile at (m, n) of `batch` will need, ahead of its mainloop.
  TRACEA_DEVICE void prefetch(int m, int n, int batch) {
    if constexpr (kAddsBias) load_bias(n, batch);
    if constexpr (Traits::kHasResidual) load_residual(m, n, batch, 0);
  }

  // Finishes and stores the rows m .. m + 64 kSlabs - 1, columns n .. n + kTileN - 1.
  TRACEA_DEVICE void store(float (&accumulators)[Traits::kSlabs][kAccumulators], int m, int n,
                           int batch) {
    if constexpr (kAddsBias) share_bias();
    TRACEA_UNROLL
    for (int slab = 0; slab < Traits::kSlabs; ++slab) {
      TRACEA_UNROLL
      for (int sub = 0; sub < kSubTiles; ++sub) {
        const int row = m + slab * Tile::kRows, column = n + sub * Tile::kColumns;
        if constexpr (kAddsBias) add_bias(accumulators[slab], sub);
        if constexpr (Traits::kSavesPreactivation) {
          stage_all<Activation::kNone, false>(accumulators[slab], sub);
          publish(params_.preactivation, column, row, batch);
        }
        stage_all<Traits::kActivation, Traits::kHasResidual>(accumulators[slab], sub);
        if constexpr (Traits::kHasResidual) {
          const int next = slab * kSubTiles + sub + 1;
          if (next < Traits::kSlabs * kSubTiles) load_residual(m, n, batch, next);
        }
        publish(params_.out, column, row, batch);
      }
    }
  }

  // Shared memory may be given up after this.
  TRACEA_DEVICE void drain() {
    if (leader_) cp_async_bulk_wait_group_read<0>();
  }

 private:
  // Each thread fetches a column or two; all threads will need all of them.
  TRACEA_DEVICE void load_bias(int n, int batch) {
    const u64 first = Traits::kBiasIsBatched ? static_cast<u64>(batch) * params_.n : 0;
    const ElementBias* bias = static_cast<const ElementBias*>(params_.bias) + first;
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      const bool inside =
          Traits::kHasBias && column < Traits::kTileN && n + column < params_.n;
      bias_[i] = inside ? widen(bias[n + column]) : 0.0f;
    }
  }

  TRACEA_DEVICE void share_bias() {
    TRACEA_UNROLL
    for (int i = 0; i < kBiasPerThread; ++i) {
      const int column = thread_ + i * kWarpgroupSize;
      if (column < Traits::kTileN) st_shared(smem_bias_ + 4 * column, bias_[i]);
    }
    warpgroup_barrier(warpgroup_);
  }

  // Sub-tile `index` of the residual, counted along n first.
  TRACEA_DEVICE void load_residual(int m, int n, int batch, int index) {
    const int row0 = m + index / kSubTiles * Tile::kRows;
    const int column =
        n + index % kSubTiles * Tile::kColumns + wgmma_accumulator_col(thread_, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + wgmma_accumulator_row(thread_, 2 * half);
      const u64 first = (static_cast<u64>(batch) * params_.m + row) * params_.n + column;
      const ElementResidual* residual =
          static_cast<const ElementResidual*>(params_.residual) + first;
      load_residual_row<0>(residual, row < params_.m ? params_.n - column : 0, half);
    }
  }

  // The pairs of this thread in one row; `count` elements of the row are left.
  template <int kBlock>
  TRACEA_DEVICE void load_residual_row(const ElementResidual* row, int count, int half) {
    if constexpr (kBlock < Tile::kBlocks) {
      residual_[kBlock][half] = load_pair_before<8 * kBlock>(row, count);
      load_residual_row<kBlock + 1>(row, count, half);
    }
  }

  // z, in place: it is both a result and the argument of the activation.
  TRACEA_DEVICE void add_bias(float (&accumulators)[kAccumulators], int sub) {
    TRACEA_UNROLL
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int column =
          sub * Tile::kColumns + 8 * block + wgmma_accumulator_col(thread_, 0);
      const Pair bias = ld_shared_pair(smem_bias_ + 4 * column);
      TRACEA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * (sub * Tile::kBlocks + block) + 2 * half;
        accumulators[i] += bias.x;
        accumulators[i + 1] += bias.y;
      }
    }
  }

  // Rounds a sub-tile of the result, or of z, into the buffer whose turn it is.
  template <Activation kActivation, bool kJoinsResidual>
  TRACEA_DEVICE void stage_all(const float (&accumulators)[kAccumulators], int sub) {
    const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
    TRACEA_UNROLL
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      Chunk<Element> c;
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int which = i / 2, half = i % 2, block = Tile::block(chunk, which);
        const float* z = accumulators + 4 * (sub * Tile::kBlocks + block) + 2 * half;
        Pair y{activate<kActivation>(z[0]), activate<kActivation>(z[1])};
        if constexpr (kJoinsResidual) y = join(y, residual_[block][half].widen());
        c.pairs[which][half] = Packed<Element>::from(y);
      }
      stage<typename Traits::Swizzle>(buffer, thread_, chunk, c);
    }
  }

  TRACEA_DEVICE static Pair join(Pair y, Pair residual) {
    if constexpr (Traits::kMultipliesResidual) {
      return {y.x * residual.x, y.y * residual.y};
    } else {
      return {y.x + residual.x, y.y + residual.y};
    }
  }

  // Sends the staged buffer on its way; the next one is free to stage into.
  TRACEA_DEVICE void publish(const TensorMap* map, int column, int row, int batch) {
    fence_proxy_async_shared();
    if (leader_) cp_async_bulk_wait_group_read<Traits::kEpilogueBuffers - 2>();
    warpgroup_barrier(warpgroup_);
    if (leader_) {
      const u32 buffer = buffers_ + buffer_idx_ * Tile::kBytes;
      cp_async_bulk_tensor_3d_store(map, buffer, column, row, batch);
      cp_async_bulk_commit_group();
    }
    buffer_idx_ = buffer_idx_ + 1 == Traits::kEpilogueBuffers ? 0 : buffer_idx_ + 1;
  }

  const EpilogueParams& params_;
  const u32 buffers_, smem_bias_;
  const int warpgroup_, thread_;
  const bool leader_;
  int buffer_idx_ = 0;
  float bias_[kBiasPerThread];
  Packed<ElementResidual> residual_[Tile::kBlocks][2];  // of the sub-tile that is next
};

}  // namespace tracea
