// attention_backward_bias_sm90: the gradient of a bias of attention, on Hopper.
//
//     ds = p * (do v' - delta)      p, delta: see attention_backward_queries_sm90.cuh
//     dbias = sum of ds over what shares the bias: examples, heads, queries or keys
//
// A tile is kTileQ x kTileKv entries of the gradient, or of an axis that is shared the sums
// over all tiles. A block of threads computes every gridDim.x-th pair of tiles, which lie
// opposite each other in a head: where rules on positions hide one, the other is mostly seen.
// It goes through the terms that a tile is summed over, always in the same order, see
// tile/attention_bias_terms.cuh: what others do does not matter, and nothing is added in
// memory. Where there are few tiles, terms are dealt out in parts, which the step after this
// kernel adds up, as it does the rows or columns of a tile that share an entry.
//
// Products are taken in slabs of 64 columns of a head: one warp copies, for each term, the
// slabs of queries and keys, then those of do and values, in pairs into one ring, so that
// heads of any size have the same shared memory. Each of two consumers, a warpgroup, owns 64
// rows:
//
//     s += q k'   for each pair of slabs
//     t += do v'  for each pair            | weights p of s
//     dbias += p * (t - delta)
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma_4d.cuh"
#include "ptx/wgmma.cuh"
#include "tile/attention_bias_terms.cuh"
#include "tile/attention_blocks.cuh"
#include "tile/attention_operands.cuh"
#include "tile/common.cuh"
#include "tile/fragment.cuh"
#include "tile/gradient_scores.cuh"
#include "tile/pipeline.cuh"
#include "tile/soft_cap.cuh"
#include "tile/swizzle.cuh"

namespace tracea {

template <class Traits>
struct AttentionBiasShared {
  // A slab of queries or do, and one of keys or values.
  struct Pair {
    u8 of_queries[Traits::kTileQ * 128], of_keys[Traits::kTileKv * 128];
  };
  alignas(1024) Pair ring[Traits::kStages];
  // Of two tiles in turn, in slabs of 64 keys.
  BiasTiles<2, Traits::kBiasTiles ? Traits::kTileKv / 64 * Traits::kTileQ * 128 : 0> bias;
  u64 full[Traits::kStages], empty[Traits::kStages], bias_full[2], bias_empty[2];
};

template <class Traits>
struct AttentionBias : AttentionBiasTerms<Traits> {
  using Terms = AttentionBiasTerms<Traits>;
  using typename Terms::Term;
  using Terms::p, Terms::kTileQ, Terms::kTileKv, Terms::keys, Terms::walk_tiles;
  using Shared = AttentionBiasShared<Traits>;
  using Scores = typename Traits::Scores;  // q k', do v'
  using State = PipelineState<Traits::kStages>;
  using BiasState = PipelineState<2>;
  using Out = typename Traits::GradientElement;
  using Along = OperandDescriptor<false, 0>;
  static constexpr int kConsumers = kTileQ / 64;
  static constexpr int kCount = Scores::kAccumulators;
  static constexpr int kSlabs = ceil_div(Traits::kHeadDim, 64);
  static constexpr int kValueSlabs = ceil_div(Traits::kValueDim, 64);
  static constexpr u32 kSlabBytes = kTileQ * 128;  // of queries, also of a bias
  static constexpr u32 kPairBytes = (kTileQ + kTileKv) * 128;
  using Beside = GradientScores<Traits, false, kTileKv>;

  static_assert(sizeof(Shared) <= Traits::kSmemBytes,
                "the launch must request the shared memory that is laid out here");
  static_assert(Traits::kThreads == (1 + kConsumers) * kWarpgroupSize && kTileQ % 64 == 0,
                "one producer warpgroup, and a consumer for 64 queries");
  static_assert(Scores::kN == kTileKv && kTileKv % 64 == 0, "one instruction a step");
  static_assert(kValueSlabs < Traits::kStages, "a consumer holds all slabs of values");
  static_assert(Traits::kBiasQueries || !Traits::kBiasTiles, "of tiles all entries differ");
  static_assert(Traits::Swizzle::kPeriodBytes == 1024 && Traits::Swizzle::kBits == 3,
                "descriptors and buffers are laid out for the 128-byte swizzle");

  Shared& smem;

  TRACEA_DEVICE AttentionBias(const AttentionBiasParams& params, Shared& shared)
      : Terms(params), smem(shared) {
    if (threadIdx.x == 0) {
      TRACEA_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_init(shared_address(&smem.full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.empty[i]), empty_arrivals(kConsumers, 1));
      }
      TRACEA_UNROLL
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&smem.bias_full[i]), full_arrivals());
        mbarrier_init(shared_address(&smem.bias_empty[i]), empty_arrivals(kConsumers, 1));
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }

  TRACEA_DEVICE u32 bias_tile(int stage, int consumer) const {
    if constexpr (Traits::kBiasTiles) {
      return shared_address(smem.bias.bytes[stage]) + consumer * 64 * 128;
    }
    return 0;
  }

  // --- producer: one thread ----------------------------------------------------------

  TRACEA_DEVICE void produce() const {
    State state;
    BiasState of_bias;
    walk_tiles([&](const Term& own) {
      bool has_bias = !Traits::kBiasTiles;
      this->template walk<false>(own, [&](const Term& term, bool) {
        copy_slabs<kSlabs>(p.q, p.k, term, state);
        if (!has_bias) {
          copy_bias(own, of_bias.stage_idx, of_bias.producer_parity());
          of_bias.advance();
        }
        has_bias = true;
        copy_slabs<kValueSlabs>(p.d_out, p.v, term, state);
      });
    });
  }

  template <int kCopies>
  TRACEA_DEVICE void copy_slabs(const TensorMap* of_queries, const TensorMap* of_keys,
                                const Term& term, State& state) const {
    TRACEA_NO_UNROLL
    for (int slab = 0; slab < kCopies; ++slab) {
      const int stage = state.stage_idx;
      wait_for(smem.empty[stage], state.producer_parity());
      const u32 full = shared_address(&smem.full[stage]);
      mbarrier_arrive_expect_tx(full, kPairBytes);
      cp_async_bulk_tensor_4d(shared_address(smem.ring[stage].of_queries), of_queries, 64 * slab,
                              term.tile * kTileQ, term.head, term.example, full);
      cp_async_bulk_tensor_4d(shared_address(smem.ring[stage].of_keys), of_keys, 64 * slab,
                              term.block * kTileKv, term.head / p.group, term.example, full);
      state.advance();
    }
  }

  // All terms have the same.
  TRACEA_DEVICE void copy_bias(const Term& own, int stage, u32 parity) const {
    if constexpr (Traits::kBiasTiles) {
      wait_for(smem.bias_empty[stage], parity);
      const u32 full = shared_address(&smem.bias_full[stage]);
      mbarrier_arrive_expect_tx(full, kTileKv / 64 * kSlabBytes);
      TRACEA_UNROLL
      for (int slab = 0; slab < kTileKv / 64; ++slab) {
        cp_async_bulk_tensor_4d(bias_tile(stage, 0) + slab * kSlabBytes, p.bias,
                                own.block * kTileKv + 64 * slab, own.tile * kTileQ, own.head,
                                own.example, full);
      }
    }
  }

  // --- consumers: warpgroups ---------------------------------------------------------

  // c = the product of all slabs; each but the last kHeld is waited for, and free.
  template <int kColumns, int kHeld>
  TRACEA_DEVICE void multiply(float (&c)[kCount], State& state, u32 start, int consumer,
                              int thread) const {
    constexpr int kCopies = ceil_div(kColumns, 64);
    TRACEA_UNROLL
    for (int slab = 0; slab < kCopies; ++slab) {
      const int stage = state.stage_idx;
      wait_for(smem.full[stage], state.consumer_parity());
      const u32 a = start + stage * (kPairBytes / 16) + consumer * kConsumerUnits;
      const u32 b = start + stage * (kPairBytes / 16) + kSlabBytes / 16;
      wgmma_fence();
      TRACEA_UNROLL
      for (int step = 0; step < 4; ++step) {
        if (64 * slab + 16 * step >= kColumns) break;
        Scores::mma(c, descriptor_at<Along>(a + step * Along::kStep),
                    descriptor_at<Along>(b + step * Along::kStep), slab + step != 0);
      }
      wgmma_commit_group();
      if (slab >= kHeld) {
        wgmma_wait_group<kHeld>();
        release(before(stage, kHeld), thread);
      }
      state.advance();
    }
  }

  TRACEA_DEVICE static int before(int stage, int steps) {
    return stage >= steps ? stage - steps : stage - steps + Traits::kStages;
  }

  TRACEA_DEVICE void release(int stage, int thread) const {
    if (thread == 0) mbarrier_arrive(shared_address(&smem.empty[stage]));
  }

  TRACEA_DEVICE void consume(int consumer) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupSize;
    const u32 start = shared_address(smem.ring[0].of_queries) / 16;
    State state;
    BiasState of_bias;
    walk_tiles([&](const Term& own) {
      float sums[kCount];
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
      sum_terms(sums, own, state, of_bias, start, consumer, thread);
      store(sums, own, consumer, thread);
    });
  }

  TRACEA_DEVICE void sum_terms(float (&sums)[kCount], const Term& own, State& state,
                               BiasState& of_bias, u32 start, int consumer,
                               int thread) const {
    bool has_bias = !Traits::kBiasTiles;
    this->template walk<true>(own, [&](const Term& term, bool is_partial) {
      float s[kCount], t[kCount];
      QueryNumbers<Traits> rows;
      const int query = term.tile * kTileQ + consumer * 64;
      const i64 heads_before = static_cast<i64>(term.example) * p.heads + term.head;
      rows.load(p.rows, heads_before, p.padded, query, thread);
      multiply<Traits::kHeadDim, 1>(s, state, start, consumer, thread);
      multiply<Traits::kValueDim, kValueSlabs>(t, state, start, consumer, thread);
      wgmma_wait_group<kValueSlabs>();
      wgmma_fence_operands(s);
      release(before(state.stage_idx, kValueSlabs + 1), thread);
      if (!has_bias) wait_for(smem.bias_full[of_bias.stage_idx], of_bias.consumer_parity());
      has_bias = true;
      const Beside beside{p.scores, term.head, term.example, query,
                          term.block * kTileKv};
      beside.template add<typename Traits::Swizzle, kSlabBytes>(
          s, bias_tile(of_bias.stage_idx, consumer), thread);
      if constexpr (Traits::kSoftCap) soft_cap(s, p.to_cap);
      rows.weigh(s, p.scale_log2);
      if (is_partial) {
        const int first = term.block * kTileKv + wgmma_accumulator_col(thread, 0);
        const int* const of_keys = p.segments + static_cast<i64>(term.example) * p.padded_kv;
        hide_keys<Traits>(s, keys(term.example), query, term.block * kTileKv, rows.ids, thread,
                          [&](int j, u32(&found)[2]) {
                            TRACEA_UNROLL
                            for (int i = 0; i < 2; ++i) {
                              const int key = min(first + 8 * j + i, p.kv_len - 1);
                              found[i] = static_cast<u32>(of_keys[key]);
                            }
                          });
        if constexpr (Traits::kMaskBits) beside.mask(s, term.block, thread);
      }
      wgmma_wait_group<0>();
      wgmma_fence_operands(t);
      TRACEA_UNROLL
      for (int i = kValueSlabs; i > 0; --i) release(before(state.stage_idx, i), thread);
      TRACEA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        float c = s[i] * (t[i] - rows.delta[i / 2 % 2]);
        if constexpr (Traits::kSoftCap) {
          c *= soft_cap_slope(s[i], rows.exponent[i / 2 % 2], rcp_approx(p.scale_log2));
        }
        sums[i] += c;
      }
    });
    if (Traits::kBiasTiles && has_bias) {
      meet_warpgroup(consumer);  // all of it have read the bias
      if (thread == 0) mbarrier_arrive(shared_address(&smem.bias_empty[of_bias.stage_idx]));
      of_bias.advance();
    }
  }

  TRACEA_DEVICE void store(const float (&sums)[kCount], const Term& own, int consumer,
                           int thread) const {
    const int row_count = Traits::kBiasQueries ? p.q_len : kTileQ;
    const int column_count = Traits::kBiasKeys ? p.kv_len : kTileKv;
    const int heads = Traits::kBiasHeads ? p.heads : 1;
    const int examples = Traits::kBiasExamples ? p.batch : 1;
    const i64 head = (static_cast<i64>(own.part) * examples + own.example) * heads + own.head;
    Out* const out = static_cast<Out*>(p.gradient) + head * row_count * column_count;
    const int column = own.block * kTileKv + wgmma_accumulator_col(thread, 0);
    TRACEA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row =
          own.tile * kTileQ + consumer * 64 + wgmma_accumulator_row(thread, 2 * half);
      Out* const to = out + static_cast<i64>(row) * column_count;
      if constexpr (Traits::kUnits) {
        const int count = row < row_count ? column_count : 0;
        store_units(sums, half, to, own.block * kTileKv, count, thread);
        continue;
      }
      if (row >= row_count) continue;
      TRACEA_UNROLL
      for (int j = 0; j < kTileKv / 8; ++j) {
        const int first = column + 8 * j;
        const Pair two{sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        if (Traits::kPairs && first < column_count) {
          store_pair(to + first, two);
        } else {
          if (first < column_count) store_one(to + first, two.x);
          if (first + 1 < column_count) store_one(to + first + 1, two.y);
        }
      }
    }
  }

  // A row in units of 16 bytes: of four blocks of 8 columns each of the four lanes that share
  // the row gives pairs of three away, and has one block whole.
  TRACEA_DEVICE static void store_units(const float (&sums)[kCount], int half, Out* to,
                                        int first, int column_count, int thread) {
    const int lane = thread % 4;
    TRACEA_UNROLL
    for (int group = 0; group < kTileKv / 32; ++group) {
      Words w;
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * group + i) + 2 * half;
        w.w[i] = Packed<Out>::from({sums[at], sums[at + 1]}).bits;
      }
      exchange(w.w[0], w.w[1], lane, 1);
      exchange(w.w[2], w.w[3], lane, 1);
      exchange(w.w[0], w.w[2], lane, 2);
      exchange(w.w[1], w.w[3], lane, 2);
      const int column = first + 32 * group + 8 * lane;
      if (column < column_count) *reinterpret_cast<Words*>(to + column) = w;
    }
  }

  // The second of a lower lane and the first of the lane `far` above it change places.
  TRACEA_DEVICE static void exchange(u32& first, u32& second, int lane, int far) {
    const bool is_upper = (lane & far) != 0;
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, is_upper ? first : second, far);
    first = is_upper ? other : first;
    second = is_upper ? second : other;
  }

  TRACEA_DEVICE static void store_pair(float* to, Pair two) {
    *reinterpret_cast<float2*>(to) = make_float2(two.x, two.y);
  }
  template <class Element>
  TRACEA_DEVICE static void store_pair(Element* to, Pair two) {
    *reinterpret_cast<u32*>(to) = Packed<Element>::from(two).bits;
  }
  TRACEA_DEVICE static void store_one(float* to, float one) { *to = one; }
  template <class Element>
  TRACEA_DEVICE static void store_one(Element* to, float one) {
    to->bits = static_cast<u16>(Packed<Element>::from({one, 0.0f}).bits);
  }
};

template <class Traits>
TRACEA_DEVICE void attention_backward_bias_sm90(const AttentionBiasParams& p) {
  using Kernel = AttentionBias<Traits>;
  run_roles<Traits>(Kernel(p, shared_memory<typename Kernel::Shared>()));
}

}  // namespace tracea
