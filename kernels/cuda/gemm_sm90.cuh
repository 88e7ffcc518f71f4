// gemm_sm90: C[b] = epilogue(op(A[b]) @ op(B[b])) on Hopper, accumulated in f32.
//
// A persistent grid of clusters walks the output tiles. In each block one warp keeps a
// ring of stages full with tensor-map copies, and one or two warpgroups multiply from the
// ring (wgmma) and finish their own rows of the tile:
//
//            kTileN                producer:   wait empty -> expect bytes -> copy A, B
//         +----------+             consumer w: wait full -> wgmma -> arrive empty
//   64 *  | consumer | 0
//  kSlabs +----------+             A stage is A (kTileM x kTileK) and B (kTileK x kTileN),
//         | consumer | 1           each in rows of 128 swizzled bytes: along k if the
//         +----------+             operand is stored with k contiguous, else along m or n
//                                  in slabs of 64 (tensor cores read both if 16-bit).
//
// Or each consumer computes whole tiles, those of the block in turn (ping-pong). The ring
// passes from one to the other: while one finishes its tile, the other multiplies.
//
//   consumer 0:  multiply tile 0 | finish tile 0   | multiply tile 2 | ...
//   consumer 1:                  | multiply tile 1 | finish tile 1   | ...
//
// TF32 operands are read by the tensor cores only along k. A may be stored along m (slabs
// of 32) all the same: it then passes through registers, see register_operand.cuh. Where
// only A is stored along k, C^T = op(B)^T op(A)^T is computed and stored transposed: here
// A, B, m and n are those of the product that is computed.
//
// Two blocks of a cluster lie side by side along m (sharing B) or n (sharing A). Each
// copies half of the shared operand into both. Tiles past the edge of the output are
// computed on zeros and stored nowhere, so that partners always work in step.
//
// Or the kClusterK blocks of a cluster share a tile, each a range of k. Their sums meet
// through distributed shared memory, added in the order of k: results do not depend on
// which block is first. Only the tiles of the last round are shared, see tile/scheduler.cuh.
//
// A gated product y = activation(A G) * (A U) is one with B = [G, U] by half tiles. Both
// accumulators of an entry of y belong to one thread.
//
// f32 operands as three bf16 parts, x = x0 + x1 + x2, are 3 A tiles and 3 B tiles in one
// stage. The six products of parts above 2^-24 of the result, smallest first, are summed
// over one stage and only then added to the total: in f32 units, which round to nearest,
// as the tensor cores' own additions truncate.
//
// Assumes k >= 1, every stored row of A and B a multiple of 16 bytes, and fewer than 2^31
// tiles. PTX ISA: "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier".
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/common.cuh"
#include "tile/epilogue.cuh"
#include "tile/operand_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_operand.cuh"
#include "tile/scheduler.cuh"
#include "tile/split_k.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct GemmSm90Params {
  const TensorMap* a;
  const TensorMap* b;
  const TensorMap* b_tail;  // copies what a last slab of B begins with, if it ends early
  const TensorMap* up;  // the second right operand of a gated product, else null
  EpilogueParams<Traits> epilogue;
  int m, n, k, batch;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

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
struct GemmSm90Shared {
  alignas(1024) u8 a[Traits::kStages][Traits::kParts * Traits::kRowsA * 128];
  alignas(1024) u8 b[Traits::kStages][Traits::kParts * Traits::kRowsB * 128];
  alignas(1024) u8 staging[Traits::kConsumers][Traits::kEpilogueBuffers][64 * 128];
  alignas(16) float bias[Traits::kConsumers][WarpgroupEpilogue<Traits>::kBiasColumns];
  u64 full_barrier[Traits::kStages];
  u64 empty_barrier[Traits::kStages];
  // Of each consumer: that it has multiplied, a phase for each tile of ping-pong, then those
  // of the copies of the residual.
  u64 consumer_barriers[Traits::kConsumers]
                       [1 + WarpgroupEpilogue<Traits>::kResidualCopies];
};

// What a block computes at a time: the tile whose first row and column are (m, n), or of it
// the sum over a part of k, as its cluster shares the tile.
struct Work {
  int m, n, batch;
  int first_k_tile, last_k_tile;  // [first, last)
  bool is_shared;
};

template <class Traits>
struct GemmSm90 {
  using Shared = GemmSm90Shared<Traits>;
  using Mma = typename Traits::Mma;
  using State = PipelineState<Traits::kStages>;
  // Columns of B that come from one array: those of C, as a gated product has two.
  static constexpr int kArraysB = Traits::kGated ? 2 : 1;
  static constexpr int kColumns = Traits::kTileN / kArraysB;
  using TileA =
      OperandTile<Traits::kTileM, Traits::kTransA, Traits::kElementBytes, Traits::kClusterN,
                  Traits::kRowsA>;
  using TileB =
      OperandTile<kColumns, !Traits::kTransB, Traits::kElementBytes, Traits::kClusterM>;
  using DescriptorA = OperandDescriptor<Traits::kTransA, TileA::k64Bytes>;
  using DescriptorB = OperandDescriptor<!Traits::kTransB, TileB::k64Bytes>;
  using Fragments =
      RegisterOperand<RegisterOperandMap<typename Traits::Swizzle, Traits::kTransposed>>;
  using Raster = BandedRaster<Traits::kRasterBand>;
  using Deal = TileDeal<Traits::kClusterM * Traits::kClusterN, Traits::kClusterK>;
  using Products = PartProducts<Traits::kParts>;

  static constexpr int kTileK = 128 / Traits::kElementBytes;
  static constexpr int kStepsK = 4;  // of one instruction each, 32 bytes deep
  static constexpr int kParts = Traits::kParts;
  static constexpr int kSlabs = Traits::kSlabs;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr bool kPingPong = Traits::kPingPong;
  static constexpr int kTileConsumers = kPingPong ? 1 : kConsumers;  // that share a tile
  static constexpr int kSharers = Traits::kClusterM * Traits::kClusterN;
  static constexpr int kClusterSize = kSharers * Traits::kClusterK;
  static constexpr bool kPromotes = kParts > 1;
  // Who says that a stage was read: each warp that loaded fragments of it, or one thread of
  // a warpgroup, as a finished wgmma is finished for all of it.
  static constexpr int kReaders = Traits::kFragmentsA ? kWarpgroupSize / kWarpSize : 1;
  static constexpr u32 kStageBytesA = kParts * TileA::kBytes;
  static constexpr u32 kStageBytesB = kParts * kArraysB * TileB::kBytes;
  // What is copied into a stage, whichever block of the cluster copies it.
  static constexpr u32 kCopiedBytes =
      kParts * (TileA::kCopiedBytes + kArraysB * TileB::kCopiedBytes);

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize,
                "one producer warpgroup and the consumers");
  static_assert(Traits::kTileM == kTileConsumers * kSlabs * 64, "consumers split the rows");
  static_assert(!kPingPong || (kConsumers == 2 && Traits::kClusterK == 1),
                "two consumers take turns, at tiles that are their own");
  static_assert(kConsumers <= 2 && kSharers <= 2, "named barriers, cluster partners");
  static_assert(kSharers == 1 || Traits::kClusterK == 1, "a cluster shares k or operands");
  static_assert(Mma::kN == Traits::kTileN && Mma::kAccumulators == Traits::kTileN / 2,
                "one instruction spans the columns of the tile");
  static_assert(kArraysB * TileB::kBytes == Traits::kRowsB * 128,
                "the ring must hold what is copied");
  static_assert(!TileA::kHasTail && TileB::kHasTail == Traits::kHasTailB,
                "slabs of B may end early, and then have a tensor map of their own");
  static_assert(!Traits::kGated || kColumns % 64 == 0, "two operands lie slab by slab");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");
  static_assert(Traits::kElementBytes == 2 ||
                    (Traits::kTransA == Traits::kFragmentsA && Traits::kTransB),
                "the tensor cores read only 16-bit operands along m or n");
  static_assert(!Traits::kFragmentsA || (Traits::kElementBytes == 4 && Traits::kTransA &&
                                         kParts == 1 && Traits::kWaitDepth == 0),
                "fragments are TF32, in registers that are free when a stage begins");
  static_assert(!Traits::kTransposed || Traits::kFragmentsA, "rows are paired columns");
  static_assert(TileA::kBoxRows == Traits::kBoxRowsA && TileB::kBoxRows == Traits::kBoxRowsB,
                "tensor maps must move exactly the boxes that are counted here");
  static_assert(State::at(0).producer_parity() == Traits::kFirstEmptyParity,
                "every stage starts free");
  static_assert(empty_arrivals(kTileConsumers * kReaders, kSharers) == Traits::kEmptyArrivals,
                "every consumer that shares a stage releases it");
  static_assert(!kPromotes || Traits::kWaitDepth == 0, "a promotion waits for its sums");

  const GemmSm90Params<Traits>& p;
  Shared& smem;
  const int cluster_m, cluster_n, cluster_k;  // this block's place in its cluster

  TRACEA_DEVICE int m_clusters() const {
    return ceil_div(p.m, Traits::kTileM * Traits::kClusterM);
  }
  TRACEA_DEVICE int n_clusters() const {
    return ceil_div(p.n, kColumns * Traits::kClusterN);
  }

  // The clusters' tiles of C in all batches.
  TRACEA_DEVICE u32 tiles() const {
    return static_cast<u32>(p.batch) * m_clusters() * n_clusters();
  }

  TRACEA_DEVICE Deal deal() const { return Deal{tiles(), gridDim.x}; }

  // Whether the last round leaves this block's cluster a tile to share.
  TRACEA_DEVICE bool shares_tile() const { return deal().shares_tile(blockIdx.x); }

  // Calls body(work) for each piece of work of this block.
  template <class Body>
  TRACEA_DEVICE void for_each_tile(Body&& body) const {
    const Raster raster{m_clusters(), n_clusters()};
    const int k_tiles = ceil_div(p.k, kTileK);
    TRACEA_NO_UNROLL
    for (u32 first = 0; first < tiles(); first += deal().round()) {
      const u32 tile = deal().tile(first, blockIdx.x);
      if (tile >= tiles()) break;
      const TileCoordinate at = raster.at(tile);
      const bool is_shared = deal().is_shared(first);
      const int parts = is_shared ? Traits::kClusterK : 1, part = is_shared ? cluster_k : 0;
      body(Work{(at.m * Traits::kClusterM + cluster_m) * Traits::kTileM,
                (at.n * Traits::kClusterN + cluster_n) * kColumns, at.batch,
                k_tile_bound(k_tiles, part, parts), k_tile_bound(k_tiles, part + 1, parts),
                is_shared});
    }
  }

  // Where part `part` of `parts` equal ones begins.
  TRACEA_DEVICE static int k_tile_bound(int k_tiles, int part, int parts) {
    if constexpr (Traits::kClusterK == 1) return part * k_tiles;
    return static_cast<int>(static_cast<i64>(k_tiles) * part / parts);
  }

  TRACEA_DEVICE void initialize() const {
    if (threadIdx.x == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.full_barrier[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty_barrier[i]),
                      empty_arrivals(kTileConsumers * kReaders, kSharers));
      }
      TRACEA_UNROLL
      for (int i = 0; i < kConsumers; ++i) {
        TRACEA_UNROLL
        for (u64& barrier : smem.consumer_barriers[i]) {
          mbarrier_init(shared_address(&barrier), 1);
        }
      }
      fence_mbarrier_init();
    }
    synchronize();
  }

  // All threads of the block, or of the cluster.
  TRACEA_DEVICE static void synchronize() {
    if constexpr (kClusterSize > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  TRACEA_DEVICE static void wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
  }

  // One thread of the block.
  TRACEA_DEVICE void produce() const {
    State state;
    for_each_tile([&](const Work& work) {
      TRACEA_NO_UNROLL
      for (int k_tile = work.first_k_tile; k_tile < work.last_k_tile;
           ++k_tile, state.advance()) {
        const u32 full = shared_address(&smem.full_barrier[state.stage_idx]);
        wait(shared_address(&smem.empty_barrier[state.stage_idx]),
             state.producer_parity());
        mbarrier_arrive_expect_tx(full, kCopiedBytes);
        fill(state.stage_idx, work.m, work.n, k_tile * kTileK, work.batch, full);
      }
    });
  }

  // Parts of an operand lie one after another, each with all of its batches.
  TRACEA_DEVICE void fill(int stage, int m, int n, int k, int batch, u32 full) const {
    u32 a = shared_address(smem.a[stage]), b = shared_address(smem.b[stage]);
    int batch_a = p.a_batched ? batch : 0, batch_b = p.b_batched ? batch : 0;
    TRACEA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      TileA::copy(a, p.a, nullptr, m, k, batch_a, full, cluster_n);
      TileB::copy(b, p.b, p.b_tail, n, k, batch_b, full, cluster_m);
      if constexpr (Traits::kGated) {
        TileB::copy(b + TileB::kBytes, p.up, nullptr, n, k, batch_b, full, cluster_m);
      }
      a += TileA::kBytes;
      b += kArraysB * TileB::kBytes;
      batch_a += p.a_batched ? p.batch : 1;
      batch_b += p.b_batched ? p.batch : 1;
    }
  }

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

template <class Traits>
TRACEA_DEVICE void gemm_sm90(const GemmSm90Params<Traits>& p) {
  using Kernel = GemmSm90<Traits>;
  extern __shared__ __align__(1024) u8 smem_bytes[];
  // Swizzled copies and descriptors count on it; nothing useful can happen without.
  if (shared_address(smem_bytes) % 1024 != 0) __trap();

  const int rank = Kernel::kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int sharer = rank % Kernel::kSharers;
  const Kernel kernel{p,
                      *reinterpret_cast<typename Kernel::Shared*>(smem_bytes),
                      sharer / Traits::kClusterN,
                      sharer % Traits::kClusterN,
                      rank / Kernel::kSharers};
  const int warpgroup = warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupSize);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);

  if (threadIdx.x == 0) {
    prefetch_tensormap(p.a);
    prefetch_tensormap(p.b);
    if constexpr (Traits::kHasTailB) prefetch_tensormap(p.b_tail);
    if constexpr (Traits::kGated) prefetch_tensormap(p.up);
    if constexpr (Traits::kMapsResults) prefetch_tensormap(p.epilogue.out);
    if constexpr (Traits::kMapsResidual) prefetch_tensormap(p.epilogue.residual);
  }
  kernel.initialize();

  if (warpgroup == 0) {
    if constexpr (Traits::kProducerRegisters > 0) {
      setmaxnreg_dec<Traits::kProducerRegisters>();
    }
    if (warp == 0 && elect_one()) kernel.produce();
    if (kernel.shares_tile()) {
      __syncwarp();
      cluster_barrier();  // the consumers' sums, see SplitK
    }
  } else {
    if constexpr (Traits::kConsumerRegisters > 0) {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
    }
    kernel.consume(warpgroup - 1);
  }

  // A block must outlive its partner's copies into it, arrivals at its barriers and reads
  // of its sums.
  if constexpr (Kernel::kClusterSize > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

}  // namespace tracea
