// Phase algebra of a ring of Stages shared-memory buffers.
//
// Step k uses stage k mod Stages in round r = k div Stages. With one full and one empty
// mbarrier for each stage, the consumer waits full[stage] with parity r mod 2 and the
// producer waits empty[stage] with parity (r mod 2) xor 1, which passes at once on a
// fresh barrier: every stage starts free. tracea_jax/ir/pipeline.py proves both.
#pragma once

#include "tile/common.cuh"

namespace tracea {

// Where one role stands in the ring. Producer and consumers each keep their own.
template <int Stages>
struct PipelineState {
  static_assert(Stages >= 1, "a pipeline has at least one stage");

  int stage_idx = 0;
  u32 phase = 0;

  // The state at step k, for a role that does not start at step 0.
  TRACEA_HOST_DEVICE static constexpr PipelineState at(int k) {
    return PipelineState{k % Stages, static_cast<u32>(k / Stages) & 1u};
  }

  // The parity flips only when the ring wraps.
  TRACEA_HOST_DEVICE constexpr void advance() {
    if (++stage_idx == Stages) {
      stage_idx = 0;
      phase ^= 1u;
    }
  }

  // Passes over steps that are another's.
  TRACEA_HOST_DEVICE constexpr void skip(int steps) {
    const int stages = stage_idx + steps;
    stage_idx = stages % Stages;
    phase ^= static_cast<u32>(stages / Stages) & 1u;
  }

  TRACEA_HOST_DEVICE constexpr u32 consumer_parity() const { return phase; }
  TRACEA_HOST_DEVICE constexpr u32 producer_parity() const { return phase ^ 1u; }
};

// Arrivals that complete one phase of each barrier. The full barrier counts its producer
// once (bytes are counted apart); the empty barrier counts one elected thread of every
// consumer in every block of the cluster, since a multicast writes into all of them.
TRACEA_HOST_DEVICE constexpr u32 full_arrivals() { return 1; }
TRACEA_HOST_DEVICE constexpr u32 empty_arrivals(int consumers, int cluster) {
  return static_cast<u32>(consumers * cluster);
}

// Two consumers take tiles in turn, and a barrier of each completes a phase when it has
// waited for the last step of one. What consumer tile mod 2 waits for before it multiplies:
// the parity of the other's phase for the tile before. Until then the ring may be more than
// a round behind the tile's first step, and the parity of a full barrier says too little.
TRACEA_HOST_DEVICE constexpr u32 turn_parity(u32 tile) { return ((tile + 1) / 2 & 1u) ^ 1u; }

// cp.async pipelines, one committed group for each step, also an empty one in the tail:
//   form A   wait, barrier, issue load k+Stages-1, compute k
//   form B   barrier, issue load k+Stages-1, wait, barrier, compute k
// The number of younger groups that may still be in flight when step k is computed.
template <int Stages>
struct AsyncCopyPipeline {
  static_assert(Stages >= 2, "one stage needs a plain barrier, not a group wait");

  static constexpr int kPrologueGroups = Stages - 1;
  static constexpr int kGroupsBehindA = Stages - 2;
  static constexpr int kGroupsBehindB = Stages - 1;

  TRACEA_HOST_DEVICE static constexpr int compute_stage(int k) { return k % Stages; }
  TRACEA_HOST_DEVICE static constexpr int load_stage(int k) {
    return (k + Stages - 1) % Stages;
  }
};

}  // namespace tracea
