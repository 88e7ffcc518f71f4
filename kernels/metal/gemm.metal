// C[b] = epilogue(op(A[b]) @ op(B[b])) by simdgroup_matrix, f32 inside.
//
// The sibling of gemm_sm80 (kernels/cuda) in Metal: the same tiles, order of tiles and ring
// of stages. A stage passes through registers, its loads on their way while the stage before
// it is multiplied. In threadgroup memory tiles lie as in memory; simdgroup_load transposes.
//
//   step k:  barrier, load k + kStages - 1 into registers, multiply stage k,
//            store the registers to threadgroup memory
//
// Results of 8 x 8 pass through threadgroup memory, too, where every thread finds elements
// whose places it knows. What precedes this text names the types and the constants. To be
// compiled without fast-math, which would drop what relu makes of a NaN.

constant constexpr int kColumnsA = kTransA ? kTileM : kTileK;  // of a tile as it lies
constant constexpr int kColumnsB = kTransB ? kTileK : kTileN;
constant constexpr int kBlocksM = kTileM / kWarpsM / 8, kBlocksN = kTileN / kWarpsN / 8;
constant constexpr int kUnitA = kAlignA / sizeof(Element), kUnitB = kAlignB / sizeof(Element);
constant constexpr int kCopiesA = kTileM * kTileK / kUnitA / kThreads;
constant constexpr int kCopiesB = kTileN * kTileK / kUnitB / kThreads;
static_assert(kCopiesA * kUnitA * kThreads == kTileM * kTileK, "threads copy equally much");
static_assert(kCopiesB * kUnitB * kThreads == kTileN * kTileK, "threads copy equally much");

struct Tile {
  int m, n, batch;
};

// Tiles are numbered batch by batch; inside a batch bands of kRasterBand rows of tiles are
// walked column by column.
inline Tile tile_at(uint tile, uint rows, uint columns) {
  const uint band_tiles = uint(kRasterBand) * columns;
  const uint batch = tile / (rows * columns);
  const uint local = tile - batch * (rows * columns);
  const uint band = local / band_tiles;
  const uint in_band = local - band * band_tiles;
  const uint left = rows - band * uint(kRasterBand);
  const uint height = left < uint(kRasterBand) ? left : uint(kRasterBand);
  const uint n = in_band / height;
  return {int(band * uint(kRasterBand) + in_band - n * height), int(n), int(batch)};
}

// Units of a tile of kColumns columns, whose first element is (row, column) of a matrix of
// so many rows and columns; zeros stand for what is outside.
template <typename Unit, int kUnit, int kColumns, int kCopies>
inline void load_units(thread Unit (&units)[kCopies], device const Element* matrix, int row,
                       int column, int rows, int columns, int thread_index) {
  for (int copy = 0; copy < kCopies; ++copy) {
    const int unit = thread_index + copy * kThreads;
    const int r = row + unit / (kColumns / kUnit);
    const int c = column + unit % (kColumns / kUnit) * kUnit;
    units[copy] = Unit(0);
    if (r < rows && c < columns) {
      units[copy] = *(device const Unit*)(matrix + long(r) * columns + c);
    }
  }
}

template <typename Unit, int kUnit, int kCopies>
inline void store_units(threadgroup Element* stage, thread const Unit (&units)[kCopies],
                        int thread_index) {
  for (int copy = 0; copy < kCopies; ++copy) {
    *(threadgroup Unit*)(stage + (thread_index + copy * kThreads) * kUnit) = units[copy];
  }
}

// 1 / (1 + 2^x).
inline float sigmoid_of_exponent(float x) { return 1.0f / (1.0f + exp2(x)); }

// The formulas of kernels/cuda/tile/activation.cuh.
inline float activate(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kGeluLinear = -2.0f * 0.7978845608028654f * kLog2E;
  if (kActivation == kRelu) return x < 0.0f ? 0.0f : x;
  if (kActivation == kSilu) return x * sigmoid_of_exponent(-kLog2E * x);
  if (kActivation == kGelu) {
    return x * sigmoid_of_exponent(x * fma(kGeluLinear * 0.044715f * x, x, kGeluLinear));
  }
  if (kActivation == kGeluExact) {
    const float s = 1.0f / fma(0.42f * 0.70710678118654752f, fabs(x), 1.0f);
    float scaled = 0.5f * 0.0783894756f;
    scaled = fma(scaled, s, 0.5f * -0.356951365f);
    scaled = fma(scaled, s, 0.5f * 0.51032988f);
    scaled = fma(scaled, s, 0.5f * -0.203207188f);
    scaled = fma(scaled, s, 0.5f * 0.314210382f);
    scaled = fma(scaled, s, 0.5f * 0.17730427f);
    scaled = fma(scaled, s, 0.5f * 0.243571932f);
    scaled = fma(scaled, s, 0.5f * 0.236326711f);
    scaled = fma(scaled, s, 0.5f * 2.59424593e-05f);
    const float tail = scaled * exp2(-0.5f * kLog2E * (x * x));
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
  return x;
}

struct Operands {
  device const Element* a;
  device const Element* b;
  device const ElementBias* bias;
  device const ElementResidual* residual;
  device ElementOut* out;
  device ElementOut* z;
};

inline void finish(thread const Operands& p, constant const Shape& shape, float acc, int m,
                   int n, int batch) {
  const long index = (long(batch) * shape.m + m) * shape.n + n;
  float value = acc;
  if (kHasBias) value += float(p.bias[(kBiasIsBatched ? long(batch) * shape.n : 0) + n]);
  if (kSavesPreactivation) p.z[index] = ElementOut(value);
  value = activate(value);
  if (kHasResidual) {
    const float residual = float(p.residual[index]);
    value = kMultipliesResidual ? value * residual : value + residual;
  }
  p.out[index] = ElementOut(value);
}

// What a thread loads and stores of one stage of both operands.
struct Copies {
  device const Element* a;  // of this batch
  device const Element* b;
  int m, n, thread_index;  // first row and column of the tile

  void load(thread UnitA (&units_a)[kCopiesA], thread UnitB (&units_b)[kCopiesB],
            constant const Shape& shape, int k) const {
    load_units<UnitA, kUnitA, kColumnsA>(units_a, a, kTransA ? k : m, kTransA ? m : k,
                                         kTransA ? shape.k : shape.m,
                                         kTransA ? shape.m : shape.k, thread_index);
    load_units<UnitB, kUnitB, kColumnsB>(units_b, b, kTransB ? n : k, kTransB ? k : n,
                                         kTransB ? shape.n : shape.k,
                                         kTransB ? shape.k : shape.n, thread_index);
  }

  void store(thread const UnitA (&units_a)[kCopiesA], thread const UnitB (&units_b)[kCopiesB],
             threadgroup Element* stages_a, threadgroup Element* stages_b, int stage) const {
    store_units<UnitA, kUnitA>(stages_a + stage * kTileM * kTileK, units_a, thread_index);
    store_units<UnitB, kUnitB>(stages_b + stage * kTileN * kTileK, units_b, thread_index);
  }
};

inline void gemm(thread const Operands& p, constant const Shape& shape,
                 threadgroup uchar* shared, uint block, int thread_index) {
  threadgroup Element* const stages_a = (threadgroup Element*)shared;
  threadgroup Element* const stages_b = stages_a + kStages * kTileM * kTileK;
  threadgroup float* const results = (threadgroup float*)(stages_b + kStages * kTileN * kTileK);
  const int lane = thread_index % 32, simdgroup = thread_index / 32;
  const int warp_m = simdgroup / kWarpsN * kBlocksM * 8;  // first row and column of this
  const int warp_n = simdgroup % kWarpsN * kBlocksN * 8;  // SIMD group in the tile

  const Tile at = tile_at(block, (shape.m + kTileM - 1) / kTileM, (shape.n + kTileN - 1) / kTileN);
  const int m = at.m * kTileM, n = at.n * kTileN;
  device const Element* const a = p.a + (shape.a_batched ? long(at.batch) * shape.m * shape.k : 0);
  device const Element* const b = p.b + (shape.b_batched ? long(at.batch) * shape.n * shape.k : 0);

  const Copies copies{a, b, m, n, thread_index};
  UnitA units_a[kCopiesA];
  UnitB units_b[kCopiesB];
  simdgroup_matrix<float, 8, 8> accumulators[kBlocksM][kBlocksN];
  for (int i = 0; i < kBlocksM; ++i) {
    for (int j = 0; j < kBlocksN; ++j) {
      accumulators[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copies.load(units_a, units_b, shape, stage * kTileK);
    copies.store(units_a, units_b, stages_a, stages_b, stage);
  }
  const int k_tiles = (shape.k + kTileK - 1) / kTileK;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Beyond k these are zeros.
    copies.load(units_a, units_b, shape, (k_tile + kStages - 1) * kTileK);
    threadgroup const Element* stage_a = stages_a + k_tile % kStages * kTileM * kTileK;
    threadgroup const Element* stage_b = stages_b + k_tile % kStages * kTileN * kTileK;
    for (int k = 0; k < kTileK; k += 8) {
      simdgroup_matrix<Element, 8, 8> left[kBlocksM], right[kBlocksN];
      for (int i = 0; i < kBlocksM; ++i) {
        const int row = warp_m + i * 8;
        simdgroup_load(left[i],
                       stage_a + (kTransA ? k * kColumnsA + row : row * kColumnsA + k),
                       kColumnsA, ulong2(0), kTransA);
      }
      for (int j = 0; j < kBlocksN; ++j) {
        const int column = warp_n + j * 8;
        simdgroup_load(right[j],
                       stage_b + (kTransB ? column * kColumnsB + k : k * kColumnsB + column),
                       kColumnsB, ulong2(0), kTransB);
      }
      for (int i = 0; i < kBlocksM; ++i) {
        for (int j = 0; j < kBlocksN; ++j) {
          simdgroup_multiply_accumulate(accumulators[i][j], left[i], right[j],
                                        accumulators[i][j]);
        }
      }
    }
    copies.store(units_a, units_b, stages_a, stages_b, (k_tile + kStages - 1) % kStages);
  }

  threadgroup float* const passing = results + simdgroup * 64;
  for (int i = 0; i < kBlocksM; ++i) {
    for (int j = 0; j < kBlocksN; ++j) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_store(accumulators[i][j], passing, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (int e = lane; e < 64; e += 32) {
        const int row = m + warp_m + i * 8 + e / 8, column = n + warp_n + j * 8 + e % 8;
        if (row < shape.m && column < shape.n) {
          finish(p, shape, passing[e], row, column, at.batch);
        }
      }
    }
  }
}
