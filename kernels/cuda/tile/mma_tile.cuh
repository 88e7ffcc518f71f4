// A block's product of two operands through a ring of stages, by cp.async and mma.sync.
//
//               kTileN
//         +--------+--------+         tile k:  load the fragments of the next step
//         | warp 0 | warp 1 |  kTileM          start a part of the copies of tile
//         +--------+--------+                  k + kStages - 1
//         | warp 2 | warp 3 |                  multiply this step, 32 bytes of k
//         +--------+--------+         before its last step: tile k + 1 has landed, barrier
//
// CopyA and CopyB have the interface of TileCopy: start(smem, part) and finish(smem, part)
// copy a part of a tile, advance() goes on to the next one. They are members of the tile, or
// borrowed ones: which is faster is a matter of the kernel.
//
// Traits: Element, SwizzleA, SwizzleB, kTileM, kTileN, kTileK, kWarpsM, kWarpsN, kStages,
// kThreads, kSmemBytes; kMnMajorA, kMnMajorB: rows of the operand's tiles run along m or n.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "tile/common.cuh"
#include "tile/mma_operand.cuh"
#include "tile/operand_map.cuh"
#include "tile/pipeline.cuh"

namespace tracea {

template <class Traits>
struct MmaTileShape {
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Traits::Element));
  static constexpr int kSteps = Traits::kTileK * kElementBytes / kStepBytes;
  static constexpr int kParts = kSteps - 1;  // of the copies: the last step waits for them
  // Of a warp, in blocks of 16.
  static constexpr int kBlocksM = Traits::kTileM / Traits::kWarpsM / 16;
  static constexpr int kBlocksN = Traits::kTileN / Traits::kWarpsN / 16;
  static constexpr int kThreads = Traits::kWarpsM * Traits::kWarpsN * kWarpSize;

  static_assert(kThreads == Traits::kThreads, "the launch must have all the warps");
  static_assert(kBlocksM * 16 * Traits::kWarpsM == Traits::kTileM &&
                    kBlocksN * 16 * Traits::kWarpsN == Traits::kTileN,
                "warps hold whole blocks of 16 rows and columns");
  static_assert(kSteps >= 2 && kSteps % 2 == 0, "fragments take turns in two buffers");

  TRACEA_DEVICE static int warp_m() { return warp() / Traits::kWarpsN; }
  TRACEA_DEVICE static int warp_n() { return warp() % Traits::kWarpsN; }
  // The warp's first row and column of the tile.
  TRACEA_DEVICE static int first_row() { return warp_m() * kBlocksM * 16; }
  TRACEA_DEVICE static int first_column() { return warp_n() * kBlocksN * 16; }

 private:
  TRACEA_DEVICE static int warp() {
    return warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  }
};

// Copies that stay where they are. The tiles of convolutions have them: as members, those of
// weights take up to 4 % more time, while plain products have less to compute (4 of 160
// instructions of the loop).
template <class Copy>
class Borrowed {
 public:
  static constexpr int kBytes = Copy::kBytes, kRowBytes = Copy::kRowBytes;

  TRACEA_DEVICE Borrowed(Copy& copy) : copy_(copy) {}
  TRACEA_DEVICE void start(u32 smem, int part) { copy_.start(smem, part); }
  TRACEA_DEVICE void finish(u32 smem, int part) { copy_.finish(smem, part); }
  TRACEA_DEVICE void advance() { copy_.advance(); }

 private:
  Copy& copy_;
};

template <class Traits, class CopyA, class CopyB>
class MmaTile {
 public:
  using Shape = MmaTileShape<Traits>;
  using Element = typename Traits::Element;
  using Ring = AsyncCopyPipeline<Traits::kStages>;
  static constexpr int kSteps = Shape::kSteps, kParts = Shape::kParts;
  static constexpr int kBlocksM = Shape::kBlocksM, kBlocksN = Shape::kBlocksN;
  using Accumulators = float[kBlocksM][2 * kBlocksN][4];

  using ReaderA =
      OperandReader<OperandMap<typename Traits::SwizzleA, CopyA::kRowBytes,
                               Shape::kElementBytes, true, Traits::kMnMajorA, kBlocksM>>;
  using ReaderB =
      OperandReader<OperandMap<typename Traits::SwizzleB, CopyB::kRowBytes,
                               Shape::kElementBytes, false, Traits::kMnMajorB, kBlocksN>>;

  static_assert(Traits::kStages * (CopyA::kBytes + CopyB::kBytes) == Traits::kSmemBytes,
                "the launch must request exactly the shared memory that is laid out here");
  static_assert(CopyA::kBytes % Traits::SwizzleA::kPeriodBytes == 0 &&
                    CopyB::kBytes % Traits::SwizzleB::kPeriodBytes == 0,
                "every stage must begin with a new period of the swizzle");

  TRACEA_DEVICE MmaTile(u8* smem, const CopyA& copy_a, const CopyB& copy_b)
      : smem_a_(shared_address(smem)),
        smem_b_(smem_a_ + Traits::kStages * CopyA::kBytes),
        copy_a_(copy_a),
        copy_b_(copy_b),
        reader_a_(Shape::warp_m(), lane()),
        reader_b_(Shape::warp_n(), lane()) {}

  // Adds the products of so many tiles along k; the ring may be given up then.
  TRACEA_DEVICE void add(Accumulators& accumulators, int k_tiles) {
    fill();
    wait_for_next();
    load(0, 0);

    int reading = 0, writing = Ring::load_stage(0);  // stages
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
    cp_async_wait_group<0>();
  }

 private:
  TRACEA_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  TRACEA_DEVICE static int after(int stage) {
    return stage + 1 == Traits::kStages ? 0 : stage + 1;
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

  TRACEA_DEVICE void finish_part(int stage, int part) {
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

  TRACEA_DEVICE void multiply(Accumulators& accumulators, int buffer) {
    if constexpr (Shape::kElementBytes == 4) {
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

  const u32 smem_a_, smem_b_;
  CopyA copy_a_;
  CopyB copy_b_;
  const ReaderA reader_a_;
  const ReaderB reader_b_;
  u32 a_[2][kBlocksM][4], b_[2][kBlocksN][4];  // fragments of two steps
};

}  // namespace tracea
