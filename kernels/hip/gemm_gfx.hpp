// gemm_gfx: C[b] = epilogue(op(A[b]) @ op(B[b])) on the matrix cores of AMD GPUs, f32 inside.
//
// The sibling of gemm_sm80 (kernels/cuda): the same tiles, order of tiles, swizzles and ring.
// There are no asynchronous copies, so that a stage passes through registers: its loads are
// on their way while the stage before it is multiplied.
//
//   step k:  barrier, load k + kStages - 1 into registers, multiply stage k,
//            store the registers to shared memory
//
// In shared memory k runs along rows, whatever runs along those of the matrix: one that has m
// or n there is transposed on the way. kAlignA and kAlignB are the bytes that the rows of A
// and B are even multiples of, 2 to 16; zeros stand for what is outside.
//
// Assumes k >= 1, operands aligned to 16 bytes as a whole, and fewer than 2^31 tiles.
#pragma once

#include "hip.hpp"
#include "matrix_core.hpp"

namespace tracea {

struct GemmGfxParams {
  const void* a;
  const void* b;
  struct {
    void* out;
    void* preactivation;   // null unless it is saved
    const void* bias;      // (n) or (batch, n), or null
    const void* residual;  // (batch, m, n), or null
    int m, n;
  } epilogue;
  int m, n, k;
  int a_batched, b_batched;  // 0 if all batches share the operand
};

// What a thread loads at once.
template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<2> {
  using Type = u16;
};
template <>
struct UnitOf<4> {
  using Type = u32;
};
template <>
struct UnitOf<8> {
  using Type = Vector<u32, 2>;
};
template <>
struct UnitOf<16> {
  using Type = Vector<u32, 4>;
};

// The tiles of one operand, kExtent along m or n by kTileK, from memory through registers.
template <class Element, class Swizzle, int kExtent, int kTileK, bool kMnMajor, int kAlign,
          int kThreads>
class TileThroughRegisters {
 public:
  using Unit = typename UnitOf<kAlign>::Type;
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kBytes = kExtent * kTileK * kElementBytes;
  static constexpr int kRowBytes = kTileK * kElementBytes;  // in shared memory
  static constexpr int kUnit = kAlign / kElementBytes;      // elements
  static constexpr int kColumns = kMnMajor ? kExtent : kTileK;
  static constexpr int kUnitsOfRow = kColumns / kUnit;
  static constexpr int kCopies = kExtent * kTileK / kUnit / kThreads;

  static_assert(kCopies * kUnit * kThreads == kExtent * kTileK,
                "every thread copies equally much");

  // `matrix` is that of a batch, (extent, k) or (k, extent); `first` the tile's first row.
  TRACEA_HIP_DEVICE TileThroughRegisters(const void* matrix, int extent, int k, int first)
      : matrix_(static_cast<const Element*>(matrix)), extent_(extent), k_(k), first_(first) {}

  TRACEA_HIP_DEVICE void load(int k_tile) {
    TRACEA_HIP_UNROLL
    for (int copy = 0; copy < kCopies; ++copy) {
      const int mn = first_ + mn_of(copy), k = k_tile * kTileK + k_of(copy);
      const i64 index = kMnMajor ? static_cast<i64>(k) * extent_ + mn
                                 : static_cast<i64>(mn) * k_ + k;
      units_[copy] = Unit{};
      if (mn < extent_ && k < k_) {
        units_[copy] = *reinterpret_cast<const Unit*>(matrix_ + index);
      }
    }
  }

  TRACEA_HIP_DEVICE void store(u8* stage) const {
    TRACEA_HIP_UNROLL
    for (int copy = 0; copy < kCopies; ++copy) {
      const u32 first = static_cast<u32>(mn_of(copy) * kRowBytes + k_of(copy) * kElementBytes);
      if constexpr (kMnMajor) {
        const auto elements = __builtin_bit_cast(Elements, units_[copy]);
        TRACEA_HIP_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          const u32 at = Swizzle::apply(first + static_cast<u32>(i * kRowBytes));
          *reinterpret_cast<Element*>(stage + at) = elements.e[i];
        }
      } else {
        *reinterpret_cast<Unit*>(stage + Swizzle::apply(first)) = units_[copy];
      }
    }
  }

 private:
  struct Elements {
    Element e[kUnit];
  };

  TRACEA_HIP_DEVICE static int unit(int copy) { return thread_index() + copy * kThreads; }
  TRACEA_HIP_DEVICE static int mn_of(int copy) {
    return kMnMajor ? unit(copy) % kUnitsOfRow * kUnit : unit(copy) / kUnitsOfRow;
  }
  TRACEA_HIP_DEVICE static int k_of(int copy) {
    return kMnMajor ? unit(copy) / kUnitsOfRow : unit(copy) % kUnitsOfRow * kUnit;
  }

  const Element* const matrix_;
  const int extent_, k_, first_;
  Unit units_[kCopies];
};

template <class Traits>
struct GemmGfxShared {
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Traits::Element));
  alignas(128) u8 a[Traits::kStages][Traits::kTileM * Traits::kTileK * kElementBytes];
  alignas(128) u8 b[Traits::kStages][Traits::kTileN * Traits::kTileK * kElementBytes];
};

template <class Traits>
class GemmGfx {
 public:
  using Element = typename Traits::Element;
  using Core = typename Traits::MatrixCore;
  using Shared = GemmGfxShared<Traits>;
  using Ring = AsyncCopyPipeline<Traits::kStages>;
  using Fragment = typename Core::Fragment;
  using Accumulator = typename Core::Accumulator;

  static constexpr int kThreads = Traits::kWarpsM * Traits::kWarpsN * Core::kLanes;
  static constexpr int kBlocksM = Traits::kTileM / Traits::kWarpsM / 16;  // of a wave
  static constexpr int kBlocksN = Traits::kTileN / Traits::kWarpsN / 16;
  static constexpr int kSteps = Traits::kTileK / 16;

  using CopyA = TileThroughRegisters<Element, typename Traits::SwizzleA, Traits::kTileM,
                                     Traits::kTileK, Traits::kTransA, Traits::kAlignA,
                                     kThreads>;
  using CopyB = TileThroughRegisters<Element, typename Traits::SwizzleB, Traits::kTileN,
                                     Traits::kTileK, !Traits::kTransB, Traits::kAlignB,
                                     kThreads>;

  static_assert(sizeof(Shared) == Traits::kSmemBytes,
                "the host must know the shared memory that is laid out here");
  static_assert(kThreads == Traits::kThreads, "the launch must have all the waves");
  static_assert(kBlocksM * 16 * Traits::kWarpsM == Traits::kTileM &&
                    kBlocksN * 16 * Traits::kWarpsN == Traits::kTileN,
                "waves hold whole blocks of 16 rows and columns");
  static_assert(kSteps * 16 == Traits::kTileK, "a stage is whole steps of 16");

  TRACEA_HIP_DEVICE GemmGfx(const GemmGfxParams& params, Shared& shared, TileCoordinate at)
      : p_(params),
        shared_(shared),
        at_(at),
        copy_a_(matrix(p_.a, p_.a_batched, p_.m), p_.m, p_.k, at.m * Traits::kTileM),
        copy_b_(matrix(p_.b, p_.b_batched, p_.n), p_.n, p_.k, at.n * Traits::kTileN) {}

  TRACEA_HIP_DEVICE void run() {
    Accumulator accumulators[kBlocksM][kBlocksN] = {};
    TRACEA_HIP_UNROLL
    for (int k_tile = 0; k_tile < Ring::kPrologueGroups; ++k_tile) {
      load(k_tile);
      store(k_tile);
    }
    const int k_tiles = ceil_div(p_.k, Traits::kTileK);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      block_barrier();
      load(k_tile + Ring::kPrologueGroups);  // beyond k these are zeros
      multiply(accumulators, Ring::compute_stage(k_tile));
      store(Ring::load_stage(k_tile));
    }
    finish(accumulators);
  }

 private:
  TRACEA_HIP_DEVICE static int lane() { return thread_index() % Core::kLanes; }
  TRACEA_HIP_DEVICE static int wave() { return thread_index() / Core::kLanes; }
  TRACEA_HIP_DEVICE static int wave_m() { return wave() / Traits::kWarpsN; }
  TRACEA_HIP_DEVICE static int wave_n() { return wave() % Traits::kWarpsN; }

  // The matrix of this batch, with `extent` rows or columns beside k.
  TRACEA_HIP_DEVICE const void* matrix(const void* operand, int batched, int extent) const {
    const i64 batch = batched ? at_.batch : 0;
    return static_cast<const Element*>(operand) + batch * extent * p_.k;
  }

  TRACEA_HIP_DEVICE void load(int k_tile) {
    copy_a_.load(k_tile);
    copy_b_.load(k_tile);
  }

  TRACEA_HIP_DEVICE void store(int stage) const {
    copy_a_.store(shared_.a[stage]);
    copy_b_.store(shared_.b[stage]);
  }

  // What this lane holds of the 16 rows from `row` on, along 16 of k.
  template <class Copy, class Swizzle>
  TRACEA_HIP_DEVICE static Fragment fragment(const u8* stage, int row, int step) {
    constexpr int kElementBytes = Copy::kElementBytes;
    constexpr int kBytes = Core::kElements * kElementBytes;
    constexpr int kPart = kBytes < 16 ? kBytes : 16;  // what a swizzle leaves together
    using Part = typename UnitOf<kPart>::Type;
    struct Parts {
      Part part[kBytes / kPart];
    } parts;
    const int first = (row + lane() % 16) * Copy::kRowBytes +
                      (step * 16 + Core::first_k(lane())) * kElementBytes;
    TRACEA_HIP_UNROLL
    for (int i = 0; i < kBytes / kPart; ++i) {
      const u32 at = Swizzle::apply(static_cast<u32>(first + i * kPart));
      parts.part[i] = *reinterpret_cast<const Part*>(stage + at);
    }
    return __builtin_bit_cast(Fragment, parts);
  }

  TRACEA_HIP_DEVICE void multiply(Accumulator (&accumulators)[kBlocksM][kBlocksN],
                                  int stage) const {
    TRACEA_HIP_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      Fragment a[kBlocksM], b[kBlocksN];
      TRACEA_HIP_UNROLL
      for (int i = 0; i < kBlocksM; ++i) {
        a[i] = fragment<CopyA, typename Traits::SwizzleA>(
            shared_.a[stage], (wave_m() * kBlocksM + i) * 16, step);
      }
      TRACEA_HIP_UNROLL
      for (int j = 0; j < kBlocksN; ++j) {
        b[j] = fragment<CopyB, typename Traits::SwizzleB>(
            shared_.b[stage], (wave_n() * kBlocksN + j) * 16, step);
      }
      TRACEA_HIP_UNROLL
      for (int i = 0; i < kBlocksM; ++i) {
        TRACEA_HIP_UNROLL
        for (int j = 0; j < kBlocksN; ++j) {
          accumulators[i][j] = Core::multiply(a[i], b[j], accumulators[i][j]);
        }
      }
    }
  }

  // z = acc + bias, y = activation(z) + residual (or times residual), one rounding.
  TRACEA_HIP_DEVICE void finish(const Accumulator (&accumulators)[kBlocksM][kBlocksN]) const {
    const int first_m = at_.m * Traits::kTileM + wave_m() * kBlocksM * 16;
    const int first_n = at_.n * Traits::kTileN + wave_n() * kBlocksN * 16;
    TRACEA_HIP_UNROLL
    for (int j = 0; j < kBlocksN; ++j) {
      const int n = first_n + j * 16 + lane() % 16;
      if (n >= p_.n) continue;
      const float bias = bias_of(n);
      TRACEA_HIP_UNROLL
      for (int i = 0; i < kBlocksM; ++i) {
        TRACEA_HIP_UNROLL
        for (int e = 0; e < Core::kAccumulators; ++e) {
          const int m = first_m + i * 16 + Core::c_row(lane(), e);
          if (m < p_.m) finish(accumulators[i][j][e] + bias, m, n);
        }
      }
    }
  }

  TRACEA_HIP_DEVICE float bias_of(int n) const {
    if constexpr (Traits::kHasBias) {
      const i64 first = Traits::kBiasIsBatched ? static_cast<i64>(at_.batch) * p_.n : 0;
      return widen(static_cast<const typename Traits::ElementBias*>(p_.epilogue.bias)[first + n]);
    } else {
      return 0.0f;
    }
  }

  TRACEA_HIP_DEVICE void finish(float z, int m, int n) const {
    using ElementOut = typename Traits::ElementOut;
    const i64 index = (static_cast<i64>(at_.batch) * p_.m + m) * p_.n + n;
    if constexpr (Traits::kSavesPreactivation) {
      narrow(z, static_cast<ElementOut*>(p_.epilogue.preactivation)[index]);
    }
    float y = activate<Traits::kActivation>(z);
    if constexpr (Traits::kHasResidual) {
      const float residual =
          widen(static_cast<const typename Traits::ElementResidual*>(p_.epilogue.residual)[index]);
      y = Traits::kMultipliesResidual ? y * residual : y + residual;
    }
    narrow(y, static_cast<ElementOut*>(p_.epilogue.out)[index]);
  }

  const GemmGfxParams& p_;
  Shared& shared_;
  const TileCoordinate at_;
  CopyA copy_a_;
  CopyB copy_b_;
};

template <class Traits>
TRACEA_HIP_DEVICE void gemm_gfx(const GemmGfxParams& p, GemmGfxShared<Traits>& shared) {
  const BandedRaster<Traits::kRasterBand> raster{ceil_div(p.m, Traits::kTileM),
                                                 ceil_div(p.n, Traits::kTileN)};
  GemmGfx<Traits>(p, shared, raster.at(block_index())).run();
}

}  // namespace tracea
