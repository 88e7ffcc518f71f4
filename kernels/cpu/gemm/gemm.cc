// Everything around the kernels that is compiled without any instruction set flag:
// choice of instruction set, blocking, split into tasks.

#include "gemm/gemm.h"

#include <algorithm>
#include <cstdint>

#include "common/blocking.h"
#include "common/ladder.h"

namespace tracea::cpu {

extern const GemmIsa kBaselineGemm, kAvx2Gemm, kAvx512Gemm, kAvx512Bf16Gemm, kAmxGemm,
    kBfmmlaGemm;

namespace {

constexpr int64_t kSkinny = 16;  // rows or columns, up to which an operand is streamed
constexpr int64_t kStripCols = 1024;  // most of a streamed operand
constexpr int64_t kNearSums = 4096;   // of a strip, that stay in L1
// Of lhs, from which matrices of bf16 are worth it, and pairs of bf16 (by rhs).
constexpr int64_t kTileRows = 5;
constexpr int64_t kTileColsTransposed = 5;  // of rhs, if many rows of lhs are transposed
constexpr int64_t kPairRows = 12;
constexpr int64_t kPairRowsTransposed = 9;
constexpr int64_t kPairCols = 9;  // of rhs, from which pairs are
// Up to which packing rhs is much of the work: of bf16, and of vectors.
constexpr int64_t kFewRows = 128;
constexpr int64_t kFewVectorRows = 512;
// Of rhs, from which each row of lhs is used often enough to be brought into L1 for it, in
// blocks that it holds.
constexpr int64_t kWideCols = 1024;
constexpr int64_t kNearDepth = 512;
constexpr int64_t kCollidingStride = 1024;  // at which bf16 rows share few sets of L1
constexpr int64_t kMinDepth = 16;
constexpr int64_t kMaxDepth = 4096;
constexpr int64_t kMaxCols = 4096;
constexpr int64_t kMaxPanelBytes = int64_t{16} << 20;  // packed block of rhs
constexpr int64_t kMaxSumsBytes = int64_t{8} << 20;    // partial sums

constexpr Ladder<GemmIsa> kGemms =
    TRACEA_LADDER(&kBaselineGemm, &kAvx2Gemm, &kAvx512Gemm, &kAvx512Bf16Gemm, &kAmxGemm,
                  &kBfmmlaGemm);

// Whether its packed operands are for vectors, not for matrices.
bool UsesVectors(const GemmIsa& isa) { return isa.packed_bytes == 4 || isa.pairs; }

// What the blocks of rhs are made for, unless a configuration says otherwise.
struct Sizes {
  int64_t kc;
  double share;  // of L2 for a packed block of rhs: the rest is shared by all others
};

// Of vectors: with few rows the packed block stays in L2 together with the next one, on its
// way.
Sizes VectorSizes(int64_t rows) {
  return rows <= kFewVectorRows ? Sizes{256, 0.25} : Sizes{512, 0.5};
}

// Of pairs of bf16, as deep in vectors. With few rows they are so soon multiplied that the
// next block takes most of the time.
Sizes PairSizes(int64_t rows) {
  if (rows <= kFewRows) return {256, 0.125};
  const Sizes sizes = VectorSizes(rows);
  return {2 * sizes.kc, sizes.share};
}

// Of bf16 matrices with few rows, where packing rhs is much of the work: it stays near, and
// is read by long pieces of its rows as they are stored, in which memory is fast.
Sizes FewRowSizes(const GemmIsa& isa, const GemmArgs& args) {
  if (!isa.loads_rows || args.trans_rhs) return {1024, 0.125};
  return args.m <= isa.tile_m ? Sizes{128, 0.125} : Sizes{512, 0.25};
}

// Whether lhs can be used as it is stored.
bool CanLoadLhs(const GemmIsa& isa, const GemmArgs& args) {
  return isa.loads_rows && !args.trans_lhs && args.k % isa.depth_unit == 0;
}

// Rows of a shallow block would stay in L1 if they did not drive each other out.
bool PacksLhs(const GemmIsa& isa, const GemmArgs& args, int64_t kc) {
  if (!CanLoadLhs(isa, args)) return isa.loads_rows;
  return kc <= kNearDepth && args.n >= kWideCols && args.lhs_stride % kCollidingStride == 0;
}

// Of bf16 matrices. Rows that are used as they are stored cost little to bring again and
// again, so narrow and deep blocks save partial sums; with many columns it saves more that
// they stay in L1. Those stored by columns are packed from short pieces far apart: what
// lies beside them stays near for the next rows if the pieces are few.
Sizes ChooseSizes(const GemmIsa& isa, const GemmArgs& args) {
  if (isa.pairs) return PairSizes(args.m);
  if (UsesVectors(isa)) return VectorSizes(args.m);
  if (args.m <= kFewRows) return FewRowSizes(isa, args);
  if (isa.loads_rows && args.trans_lhs) {
    return {args.k <= kNearDepth ? kNearDepth : kNearDepth / 2, 0.125};
  }
  if (isa.loads_rows && args.n >= kWideCols && args.k > 2 * kNearDepth) {
    return {kNearDepth, 0.25};
  }
  return {CanLoadLhs(isa, args) ? 2048 : 1024, 0.5};
}

// With few of both, an operand is streamed that is stored along k if there is one.
Skinny ChooseSkinny(const GemmIsa& isa, const GemmArgs& args) {
  if (isa.packed_bytes != 4) return Skinny::kNo;
  const bool rows = args.m <= kSkinny, columns = args.n <= kSkinny;
  if (rows && columns) {
    return args.trans_rhs || args.trans_lhs ? Skinny::kRows : Skinny::kColumns;
  }
  if (rows) return Skinny::kRows;
  return columns ? Skinny::kColumns : Skinny::kNo;
}

// How many there are of what a skinny output has few of.
int64_t Few(const GemmArgs& args, Skinny skinny) {
  return skinny == Skinny::kColumns ? args.n : args.m;
}

// Of few rows, which stream rhs. Its rows that pass at once tend to lie in the same sets of
// L1, a power of two apart. If L1 has more ways than these rows, strips are so narrow that
// their sums stay in L1 too. If not, fewer rows pass and sums wait in L2: strips are as
// wide as a page. Loads of sums then keep a gap, in the low bits of their addresses, to
// stores of the row before, on which they would seem to depend.
void PlanStream(const GemmIsa& isa, const GemmArgs& args, GemmBlocks* blocks) {
  const int64_t few = std::max<int64_t>(Few(args, blocks->skinny), 1);
  const int64_t near = kNearSums / few / isa.stream_cols * isa.stream_cols;
  blocks->stream_depth = isa.stream_depth;
  blocks->strip = blocks->sums_stride = std::min(near, kStripCols);
  const int64_t ways = L1Ways();
  if (isa.stream_depth <= kShallowDepth || ways == 0 || ways > isa.stream_depth) return;
  blocks->stream_depth = kShallowDepth;
  blocks->strip = kStripCols;
  blocks->sums_stride = kStripCols + 2 * isa.stream_cols;
}

// Blocks of rhs in f32. Partial sums of f32 are kept in the output.
GemmBlocks PlanBlocks(const GemmIsa& isa, const GemmArgs& args,
                      const GemmConfig& config) {
  GemmBlocks blocks{};
  blocks.skinny = ChooseSkinny(isa, args);
  if (blocks.skinny != Skinny::kNo) PlanStream(isa, args, &blocks);
  const Sizes sizes = ChooseSizes(isa, args);
  const int64_t kc = config.kc > 0 ? config.kc : sizes.kc;
  blocks.kc = EqualStep(args.k, std::clamp(kc, kMinDepth, kMaxDepth), isa.depth_unit);
  const int64_t column = blocks.kc * isa.packed_bytes;
  const int64_t nc =
      config.nc > 0 ? config.nc : int64_t(sizes.share * double(L2Bytes())) / column;
  const int64_t most = std::min(kMaxCols, kMaxPanelBytes / column);
  const int64_t cols = std::min(RoundUp(nc, isa.tile_n), RoundUp(args.n, isa.tile_n));
  blocks.nc = std::max(std::min(cols, most / isa.tile_n * isa.tile_n), isa.tile_n);
  const int64_t rows = std::max(RoundUp(args.m, isa.tile_m), isa.tile_m);
  blocks.mc = std::min(kMaxSumsBytes / (blocks.nc * 4) / isa.tile_m * isa.tile_m, rows);
  blocks.rhs_depth = blocks.kc;
  blocks.packs_lhs = PacksLhs(isa, args, blocks.kc);
  if (UsesVectors(isa) || blocks.kc >= args.k) return blocks;
  // Partial sums that stay in L2 ask for short row strips, and these for keeping rhs.
  const int64_t near = L2Bytes() / 4 / (blocks.nc * 4) / isa.tile_m * isa.tile_m;
  const int64_t depth = RoundUp(args.k, isa.depth_unit);
  if (near >= rows || depth * blocks.nc * 2 > kMaxPanelBytes) return blocks;
  blocks.mc = std::max(near, isa.tile_m);
  blocks.rhs_depth = depth;
  return blocks;
}

// Cuts (m, n) into about `tasks` ranges of the least estimated time. In units of one
// multiply-add of a register tile: a task costs rows * cols * k, plus packing its lhs (if
// it is) once per column strip and its rhs once, at about 32 multiply-adds an element.
// Blocks of rows of vectors may be of any height, those of matrices cost as if they were
// whole.
void PlanRanges(const GemmIsa& isa, const GemmArgs& args, int64_t tasks, GemmPlan* plan) {
  constexpr double kPack = 32;
  const bool loads_lhs = isa.loads_rows && !plan->blocks.packs_lhs;
  const double lhs_pack = loads_lhs ? 0 : kPack;
  const Skinny skinny = plan->blocks.skinny;
  const int64_t row_unit = UsesVectors(isa) ? 1 : isa.tile_m;
  const int64_t unit = skinny == Skinny::kRows ? isa.stream_cols : isa.tile_n;
  double best = -1;
  for (int64_t across = 1; across <= (skinny == Skinny::kColumns ? 1 : tasks); ++across) {
    const int64_t n_step = EqualStep(args.n, CeilDiv(args.n, across), unit);
    const int64_t cols = std::min(n_step, args.n);
    const int64_t parts = std::max<int64_t>(CeilDiv(args.n, n_step), 1);
    const int64_t down = skinny == Skinny::kRows ? 1 : CeilDiv(tasks, parts);
    const int64_t m_step = EqualStep(args.m, CeilDiv(args.m, down), row_unit);
    const double strips = double(CeilDiv(cols, plan->blocks.nc));
    const double cost =
        double(m_step) * cols + lhs_pack * m_step * strips + kPack * cols;
    const double rounds = CeilDiv(parts * CeilDiv(args.m, m_step), tasks);
    if (best < 0 || cost * rounds < best) {
      best = cost * rounds;
      plan->m_step = m_step;
      plan->n_step = n_step;
    }
  }
}

// Below about 50 us of work, waking another thread costs more than it brings.
bool IsSmall(const GemmIsa& isa, const GemmArgs& args, int64_t batch) {
  const double products = double(batch) * args.m * args.n * args.k / isa.speedup;
  const double elements = double(args.m) * args.k + double(args.k) * args.n +
                          double(args.m) * args.n;
  return products < 3.5e6 && batch * elements < 2.5e5;
}

// Whether it is for products like this one. Few rows of lhs leave tiles of matrices empty,
// few columns of rhs do not pay for transposing it, and pairs are packed where f32 are
// streamed.
bool Suits(const GemmIsa& isa, const GemmArgs& args) {
  if (isa.packed_bytes == 4) return true;
  if (args.in_type != DType::kBF16) return false;
  if (!isa.pairs) {
    const bool transposes = isa.loads_rows && args.trans_lhs && args.m > kFewRows;
    return args.m >= kTileRows && !(transposes && args.n < kTileColsTransposed);
  }
  return args.m >= (args.trans_rhs ? kPairRowsTransposed : kPairRows) &&
         args.n >= kPairCols;
}

}  // namespace

const GemmIsa* UsableGemmIsa(Isa wanted, const GemmArgs& args) {
  const GemmIsa* best = kGemms.Best(wanted, [](const GemmIsa&) { return true; });
  if (Suits(*best, args)) return best;
  // Where AMX is, pairs are slow.
  return kGemms.Best(wanted, [](const GemmIsa& isa) { return isa.packed_bytes == 4; });
}

GemmPlan PlanGemm(const GemmIsa& isa, const GemmArgs& args, int64_t batch,
                  const GemmConfig& config, int64_t threads) {
  GemmPlan plan{};
  plan.blocks = PlanBlocks(isa, args, config);
  plan.workspace_bytes = isa.workspace_bytes(args, plan.blocks);
  plan.batch = batch;
  plan.m = args.m;
  plan.n = args.n;
  const int64_t per_thread = config.tasks > 0 ? std::min<int64_t>(config.tasks, 64) : 2;
  const bool serial = threads <= 1 || IsSmall(isa, args, batch);
  const int64_t tasks = serial ? 1 : threads * per_thread;
  plan.batch_step = std::max<int64_t>(CeilDiv(batch, tasks), 1);
  PlanRanges(isa, args, batch >= tasks ? 1 : CeilDiv(tasks, std::max<int64_t>(batch, 1)),
             &plan);
  return plan;
}

}  // namespace tracea::cpu
