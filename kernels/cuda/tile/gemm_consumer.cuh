// The consumers of gemm_sm90: warpgroups that multiply what is in the ring, and finish rows
// of the tile.
//
// TF32 operands are read by the tensor cores only along k. A may be stored along m (slabs
// of 32) all the same: it then passes through registers, see register_operand.cuh. Where
// only A is stored along k, C^T = op(B)^T op(A)^T is computed and stored transposed: here
// A, B, m and n are those of the product that is computed.
//
// f32 operands as three bf16 parts, x = x0 + x1 + x2, are 3 A tiles and 3 B tiles in one
// stage. The six products of parts above 2^-24 of the result, smallest first, are summed
// over one stage and only then added to the total: in f32 units, which round to nearest,
// as the tensor cores' own additions truncate.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/epilogue.cuh"
#include "tile/gemm_tiles.cuh"
#include "tile/operand_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_operand.cuh"
#include "tile/split_k.cuh"

namespace tracea {

// Which parts of A and B one stage multiplies, in this order.
template <int kParts>
struct PartProducts;
template <>
struct PartProducts<1> {
  static constexpr int kCount = 1;
  static constexpr int kLhs[kCount] = {0}, kRhs[kCount] = {0};
};
template <>
struct PartProducts<3> {
  static constexpr int kCount = 6;
  static constexpr int kLhs[kCount] = {0, 2, 1, 0, 1, 0}, kRhs[kCount] = {2, 0, 1, 1, 0, 0};
};

template <class Traits>
struct GemmConsumer : GemmTiles<Traits> {
  using Tiles = GemmTiles<Traits>;
  using typename Tiles::State;
  using typename Tiles::TileA;
  using typename Tiles::TileB;
  using Tiles::p, Tiles::smem, Tiles::cluster_k, Tiles::kParts, Tiles::kArraysB,
      Tiles::kSlabs, Tiles::kConsumers, Tiles::kPingPong, Tiles::kSharers, Tiles::kReaders,
      Tiles::for_each_tile, Tiles::wait;
  using Mma = typename Traits::Mma;
  using DescriptorA = OperandDescriptor<Traits::kTransA, TileA::k64Bytes>;
  using DescriptorB = OperandDescriptor<!Traits::kTransB, TileB::k64Bytes>;
  using Fragments =
      RegisterOperand<RegisterOperandMap<typename Traits::Swizzle, Traits::kTransposed>>;
  using Products = PartProducts<kParts>;

  static constexpr int kStepsK = 4;  // of one instruction each, 32 bytes deep
  static constexpr bool kPromotes = kParts > 1;
  static constexpr u32 kStageBytesA = kParts * TileA::kBytes;
  static constexpr u32 kStageBytesB = kParts * kArraysB * TileB::kBytes;
  static_assert(!Traits::kFragmentsA || (Traits::kElementBytes == 4 && Traits::kTransA &&
                                         kParts == 1 && Traits::kWaitDepth == 0),
                "fragments are TF32, in registers that are free when a stage begins");
  static_assert(!Traits::kTransposed || Traits::kFragmentsA, "rows are paired columns");
  static_assert(!kPromotes || Traits::kWaitDepth == 0, "a promotion waits for its sums");
  static_assert(Mma::kN == Traits::kTileN && Mma::kAccumulators == Traits::kTileN / 2,
                "one instruction spans the columns of the tile");

  // Tells every block that copies into the stage that this reader has read it.
  TRACEA_DEVICE void release(const State& state, int thread) const {
    const u32 empty = shared_address(&smem.empty_barrier[state.stage_idx]);
    const int lane = thread % (kWarpgroupSize / kReaders);
    if constexpr (kSharers > 1) {
      if (lane < kSharers) mbarrier_arrive_cluster(empty, lane);
    } else {
      if (lane == 0) mbarrier_arrive(empty);
    }
  }

  // Issues the products of one stage; `accumulate` is false if they overwrite.
  TRACEA_DEVICE static void multiply(float (&accumulators)[kSlabs][Mma::kAccumulators],
                                     u64 stage_a, u64 stage_b, bool accumulate) {
    wgmma_fence();
    TRACEA_UNROLL
    for (int i = 0; i < Products::kCount; ++i) {
      const u64 a = stage_a + Products::kLhs[i] * (TileA::kBytes / 16);
      const u64 b = stage_b + Products::kRhs[i] * (kArraysB * TileB::kBytes / 16);
      TRACEA_UNROLL
      for (int step = 0; step < kStepsK; ++step) {
        TRACEA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          Mma::mma(accumulators[slab],
                   a + slab * (TileA::k64Bytes / 16) + step * DescriptorA::kStep,
                   b + step * DescriptorB::kStep, accumulate || (i | step) != 0);
        }
      }
    }
    wgmma_commit_group();
  }

  // The same with A from registers. Each step is a batch: while it runs, the fragments of
  // the next one are read, into the registers of the batch before, which is waited for.
  TRACEA_DEVICE static void multiply(float (&accumulators)[kSlabs][Mma::kAccumulators],
                                     const Fragments& operand, u32 stage_a, u64 stage_b,
                                     bool accumulate) {
    u32 fragments[2][kSlabs][4];
    TRACEA_UNROLL
    for (int step = 0; step < kStepsK; ++step) {
      operand.load(fragments[step % 2], stage_a, step);
      wgmma_fence();
      TRACEA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        Mma::mma(accumulators[slab], fragments[step % 2][slab],
                 stage_b + step * DescriptorB::kStep, accumulate || step != 0);
      }
      wgmma_commit_group();
      if (step + 1 < kStepsK) wgmma_wait_group<1>();
    }
  }

  TRACEA_DEVICE void wait_for_turn(int consumer, u32 tile) const {
    wait(shared_address(&smem.consumer_barriers[1 - consumer][0]), turn_parity(tile));
  }

  TRACEA_DEVICE void pass_turn(int consumer, int thread) const {
    if (thread == 0) mbarrier_arrive(shared_address(&smem.consumer_barriers[consumer][0]));
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const int row = kPingPong ? 0 : consumer * kSlabs * 64;
    const u64 first_a = DescriptorA::encode(shared_address(smem.a[0]) + row * 128);
    const u64 first_b = DescriptorB::encode(shared_address(smem.b[0]));
    WarpgroupEpilogue<Traits> epilogue(
        p.epilogue, shared_address(smem.staging[consumer]),
        shared_address(smem.bias[consumer]),
        shared_address(&smem.consumer_barriers[consumer][1]), consumer);
    const Fragments operand(thread);  // A, where it passes through registers
    State state;     // the stage to multiply next
    State finished;  // the oldest stage not yet released
    u32 next = 0;    // tile of this block
    for_each_tile([&](const Work& work) {
      const u32 tile = next++;
      if (kPingPong && tile % 2 != static_cast<u32>(consumer)) {
        state.skip(work.last_k_tile - work.first_k_tile);
        finished = state;
        return;
      }
      const int m = work.m + row;
      epilogue.prefetch(m, work.n, work.batch);
      if constexpr (kPingPong) wait_for_turn(consumer, tile);
      float accumulators[kSlabs][Mma::kAccumulators];  // (64, kTileN) for each slab
      float totals[kPromotes ? kSlabs : 1][kPromotes ? Mma::kAccumulators : 1];
      if constexpr (kPromotes) fill_zero(totals);

      TRACEA_NO_UNROLL
      for (int k_tile = work.first_k_tile; k_tile < work.last_k_tile;
           ++k_tile, state.advance()) {
        wait(shared_address(&smem.full_barrier[state.stage_idx]),
             state.consumer_parity());
        // The first step of a tile, or of a promoted sum, overwrites the accumulators.
        const bool accumulate = !kPromotes && k_tile != work.first_k_tile;
        const u64 stage_b = first_b + state.stage_idx * (kStageBytesB / 16);
        if constexpr (Traits::kFragmentsA) {
          multiply(accumulators, operand, shared_address(smem.a[state.stage_idx]) + row * 128,
                   stage_b, accumulate);
        } else {
          multiply(accumulators, first_a + state.stage_idx * (kStageBytesA / 16), stage_b,
                   accumulate);
        }
        wgmma_wait_group<Traits::kWaitDepth>();
        if (k_tile >= work.first_k_tile + Traits::kWaitDepth) {
          release(finished, thread);
          finished.advance();
        }
        if constexpr (kPromotes) promote(accumulators, totals);
      }
      if constexpr (kPingPong) pass_turn(consumer, thread);
      if constexpr (Traits::kWaitDepth > 0) {
        wgmma_wait_group<0>();
        TRACEA_UNROLL
        for (int i = 0; i < Traits::kWaitDepth; ++i, finished.advance()) {
          release(finished, thread);
        }
      }
      if constexpr (kPromotes) {
        finish(epilogue, totals, m, work, consumer, thread);
      } else {
        fence_operands(accumulators);
        finish(epilogue, accumulators, m, work, consumer, thread);
      }
    });
    epilogue.drain();
  }

  // Stores this consumer's rows from `m` on, or the block's share of what the cluster
  // computed of them.
  TRACEA_DEVICE void finish(WarpgroupEpilogue<Traits>& epilogue,
                            float (&sums)[kSlabs][Mma::kAccumulators], int m,
                            const Work& work, int consumer, int thread) const {
    if constexpr (Traits::kClusterK > 1) {
      using Exchange = SplitK<Traits::kClusterK, kConsumers, kSlabs, Mma::kAccumulators>;
      static_assert(Exchange::kBytes <= sizeof(smem.a) + sizeof(smem.b),
                    "sums of the whole tile must fit where the ring was");
      const Exchange exchange(shared_address(smem.a[0]), cluster_k, consumer, thread);
      if (work.is_shared) exchange.publish(sums);
      epilogue.store_shares(sums, m, work.n, work.batch, exchange, work.is_shared);
    } else {
      epilogue.store(sums, m, work.n, work.batch);
    }
  }

  template <int kCount>
  TRACEA_DEVICE static void fill_zero(float (&values)[kSlabs][kCount]) {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) values[slab][i] = 0.0f;
    }
  }

  template <int kCount>
  TRACEA_DEVICE static void fence_operands(float (&values)[kSlabs][kCount]) {
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) wgmma_fence_operands(values[slab]);
  }

  template <int kCount>
  TRACEA_DEVICE static void promote(float (&sums)[kSlabs][kCount],
                                    float (&totals)[kSlabs][kCount]) {
    fence_operands(sums);
    TRACEA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) totals[slab][i] += sums[slab][i];
    }
  }
};

}  // namespace tracea
