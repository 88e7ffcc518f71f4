// gemm_sm80: C[b] = epilogue(op(A[b]) @ op(B[b])) on every GPU since sm_80, f32 inside.
//
// One block computes one tile of the output. A ring of stages in shared memory is kept full
// by asynchronous copies of all threads; the warps split the tile and multiply from the
// ring, and each stores its own part straight from the registers:
//
//               kTileN
//         +--------+--------+         tile k:  load the fragments of the next step
//         | warp 0 | warp 1 |  kTileM          start a part of the copies of tile
//         +--------+--------+                  k + kStages - 1
//         | warp 2 | warp 3 |                  multiply this step, 32 bytes of k
//         +--------+--------+         before its last step: tile k + 1 has landed, barrier
//
// Operands are bf16 or f16, or f32 rounded to TF32. Rows of A, B and C may have any length:
// kAlignA and kAlignB are the bytes that the rows of A and B are even multiples of, 2 to
// 16, and zeros stand for what is outside. One kernel serves every size of its alignment.
//
// Assumes k >= 1, operands aligned to 16 bytes as a whole, and fewer than 2^31 tiles.
// PTX ISA: "cp.async", "ldmatrix", "mma".
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/async_copy.cuh"
#include "tile/common.cuh"
#include "tile/fragment_epilogue.cuh"
#include "tile/mma_operand.cuh"
#include "tile/operand_map.cuh"
#include "tile/pipeline.cuh"
#include "tile/scheduler.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

struct GemmSm80Params {
  const void* a;
  const void* b;
  FragmentEpilogueParams epilogue;
  int m, n, k;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

template <class Traits>
struct GemmSm80Shared {
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Traits::Element));
  static constexpr int kBytesA = Traits::kTileM * Traits::kTileK * kElementBytes;
  static constexpr int kBytesB = Traits::kTileN * Traits::kTileK * kElementBytes;
  alignas(128) u8 a[Traits::kStages][kBytesA];
  alignas(128) u8 b[Traits::kStages][kBytesB];
};

template <class Traits>
class GemmSm80 {
 public:
  using Element = typename Traits::Element;
  using Shared = GemmSm80Shared<Traits>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;
  using Raster = BandedRaster<Traits::kRasterBand>;

  static constexpr bool kMnMajorA = Traits::kTransA, kMnMajorB = !Traits::kTransB;
  static constexpr int kThreads = Traits::kWarpsM * Traits::kWarpsN * kWarpSize;
  static constexpr int kSteps = Traits::kTileK * Shared::kElementBytes / kStepBytes;
  static constexpr int kParts = kSteps - 1;  // the last step waits for them
  // Of a warp, in blocks of 16.
  static constexpr int kBlocksM = Traits::kTileM / Traits::kWarpsM / 16;
  static constexpr int kBlocksN = Traits::kTileN / Traits::kWarpsN / 16;

  using CopyA = TileCopy<Element, typename Traits::SwizzleA,
                         kMnMajorA ? Traits::kTileK : Traits::kTileM,
                         kMnMajorA ? Traits::kTileM : Traits::kTileK, !kMnMajorA,
                         Traits::kAlignA, kThreads, kParts>;
  using CopyB = TileCopy<Element, typename Traits::SwizzleB,
                         kMnMajorB ? Traits::kTileK : Traits::kTileN,
                         kMnMajorB ? Traits::kTileN : Traits::kTileK, !kMnMajorB,
                         Traits::kAlignB, kThreads, kParts>;
  using ReaderA =
      OperandReader<OperandMap<typename Traits::SwizzleA, CopyA::kRowBytes,
                               Shared::kElementBytes, true, kMnMajorA, kBlocksM>>;
  using ReaderB =
      OperandReader<OperandMap<typename Traits::SwizzleB, CopyB::kRowBytes,
                               Shared::kElementBytes, false, kMnMajorB, kBlocksN>>;
  using Epilogue = FragmentEpilogue<Traits, kBlocksM, 2 * kBlocksN>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(kThreads == Traits::kThreads, "the launch must have all the warps");
  static_assert(kBlocksM * 16 * Traits::kWarpsM == Traits::kTileM &&
                    kBlocksN * 16 * Traits::kWarpsN == Traits::kTileN,
                "warps hold whole blocks of 16 rows and columns");
  static_assert(kSteps >= 2 && kSteps % 2 == 0, "fragments take turns in two buffers");
  static_assert(CopyA::kBytes % Traits::SwizzleA::kPeriodBytes == 0 &&
                    CopyB::kBytes % Traits::SwizzleB::kPeriodBytes == 0,
                "every stage must begin with a new period of the swizzle");

  TRACEA_DEVICE GemmSm80(const GemmSm80Params& params, u8* smem, TileCoordinate at)
      : p_(params),
        smem_a_(shared_address(smem)),
        smem_b_(smem_a_ + Traits::kStages * CopyA::kBytes),
        at_(at),
        copy_a_(matrix(p_.a, p_.a_batched, p_.m), kMnMajorA ? p_.k : p_.m,
                kMnMajorA ? p_.m : p_.k, kMnMajorA ? 0 : at.m * Traits::kTileM,
                kMnMajorA ? at.m * Traits::kTileM : 0),
        copy_b_(matrix(p_.b, p_.b_batched, p_.n), kMnMajorB ? p_.k : p_.n,
                kMnMajorB ? p_.n : p_.k, kMnMajorB ? 0 : at.n * Traits::kTileN,
                kMnMajorB ? at.n * Traits::kTileN : 0),
        reader_a_(warp_m(), lane()),
        reader_b_(warp_n(), lane()) {}

  TRACEA_DEVICE void run() {
    float accumulators[kBlocksM][2 * kBlocksN][4] = {};
    fill();
    wait_for_next();
    load(0, 0);

    int reading = 0, writing = Ring::load_stage(0);  // stages
    const int k_tiles = ceil_div(p_.k, Traits::kTileK);
    TRACEA_NO_UNROLL
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      TRACEA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step > 0) finish_part(writing, step - 1);
        if (step < kParts) {
          load(reading, step + 1);
          start_part(writing, step);
          if (step == kParts - 1) commit();
        } else {
          wait_for_next();
          reading = after(reading);
          writing = after(writing);
          load(reading, 0);  // of the next tile; not used after the last one
        }
        multiply(accumulators, step % 2);
      }
    }
    cp_async_wait_group<0>();  // shared memory may be given up

    const int m = at_.m * Traits::kTileM + warp_m() * kBlocksM * 16;
    const int n = at_.n * Traits::kTileN + warp_n() * kBlocksN * 16;
    Epilogue(p_.epilogue, m, n, at_.batch).store(accumulators);
  }

 private:
  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  TRACEA_DEVICE static int warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  }
  TRACEA_DEVICE static int warp_m() { return warp() / Traits::kWarpsN; }
  TRACEA_DEVICE static int warp_n() { return warp() % Traits::kWarpsN; }
  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
  }

  // The matrix of this batch, with `extent` rows or columns beside k.
  TRACEA_DEVICE const void* matrix(const void* operand, int batched, int extent) const {
    const i64 batch = batched ? at_.batch : 0;
    return static_cast<const Element*>(operand) + batch * extent * p_.k;
  }

  // Starts the copies of all stages but one.
  TRACEA_DEVICE void fill() {
    TRACEA_UNROLL
    for (int stage = 0; stage < Ring::kPrologueGroups; ++stage) {
      TRACEA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        start_part(stage, part);
        finish_part(stage, part);
      }
      commit();
    }
  }

  TRACEA_DEVICE void start_part(int stage, int part) {
    copy_a_.start(smem_a_ + stage * CopyA::kBytes, part);
    copy_b_.start(smem_b_ + stage * CopyB::kBytes, part);
  }

  TRACEA_DEVICE void finish_part(int stage, int part) const {
    copy_a_.finish(smem_a_ + stage * CopyA::kBytes, part);
    copy_b_.finish(smem_b_ + stage * CopyB::kBytes, part);
  }

  // One group for each tile, whether it has copies or not: the waits count groups.
  TRACEA_DEVICE void commit() {
    cp_async_commit_group();
    copy_a_.advance();
    copy_b_.advance();
  }

  // The oldest tile that was not read yet has landed for all threads, and all of them have
  // loaded what they need of the one before.
  TRACEA_DEVICE static void wait_for_next() {
    cp_async_wait_group<Ring::kGroupsBehindA>();
    __syncthreads();
  }

  TRACEA_DEVICE void load(int stage, int step) {
    reader_a_.load(a_[step % 2], smem_a_ + stage * CopyA::kBytes, step);
    reader_b_.load(b_[step % 2], smem_b_ + stage * CopyB::kBytes, step);
  }

  TRACEA_DEVICE void multiply(float (&accumulators)[kBlocksM][2 * kBlocksN][4],
                              int buffer) {
    if constexpr (Shared::kElementBytes == 4) {
      round(a_[buffer]);
      round(b_[buffer]);
    }
    TRACEA_UNROLL
    for (int i = 0; i < kBlocksM; ++i) {
      TRACEA_UNROLL
      for (int j = 0; j < 2 * kBlocksN; ++j) {
        const u32* b = b_[buffer][j / 2] + 2 * (j % 2);
        Mma<Element>::mma(accumulators[i][j], a_[buffer][i], b[0], b[1]);
      }
    }
  }

  template <int kBlocks>
  TRACEA_DEVICE static void round(u32 (&r)[kBlocks][4]) {
    TRACEA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) r[block][i] = round_to_tf32(r[block][i]);
    }
  }

  const GemmSm80Params& p_;
  const u32 smem_a_, smem_b_;
  const TileCoordinate at_;
  CopyA copy_a_;
  CopyB copy_b_;
  const ReaderA reader_a_;
  const ReaderB reader_b_;
  u32 a_[2][kBlocksM][4], b_[2][kBlocksN][4];  // fragments of two steps
};

template <class Traits>
TRACEA_DEVICE void gemm_sm80(const GemmSm80Params& p) {
  extern __shared__ __align__(128) u8 smem_bytes[];
  using Kernel = GemmSm80<Traits>;
  const typename Kernel::Raster raster{ceil_div(p.m, Traits::kTileM),
                                       ceil_div(p.n, Traits::kTileN)};
  Kernel(p, smem_bytes, raster.at(blockIdx.x)).run();
}

}  // namespace tracea
