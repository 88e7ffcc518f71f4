// Around the attention kernels, compiled without any instruction set flag: choice of
// instruction set, split into tasks, workspace.

#include "attention/attention.h"

#include <algorithm>
#include <cstdint>

namespace tracea::cpu {

extern const AttentionIsa kBaselineAttention;
extern const AttentionGradientIsa kBaselineAttentionGradient;
#if defined(__x86_64__)
extern const AttentionIsa kAvx2Attention;
extern const AttentionIsa kAvx512Attention;
extern const AttentionGradientIsa kAvx2AttentionGradient;
extern const AttentionGradientIsa kAvx512AttentionGradient;
#if !defined(TRACEA_WITHOUT_AVX512_BF16)
extern const AttentionIsa kAvx512Bf16Attention;
extern const AttentionGradientIsa kAvx512Bf16AttentionGradient;
#endif
#if !defined(TRACEA_WITHOUT_AMX)
extern const AttentionIsa kAmxAttention;
extern const AttentionGradientIsa kAmxAttentionGradient;
#endif
#endif

namespace {

// By Isa; AVX-512 BF16 and AMX help some dtypes only.
constexpr const AttentionIsa* kAttentions[] = {
    &kBaselineAttention,
#if defined(__x86_64__)
    &kAvx2Attention,
    &kAvx512Attention,
    &kAvx512Attention,
    &kAvx512Attention,
#elif defined(__aarch64__)
    &kBaselineAttention,
#endif
};

constexpr const AttentionGradientIsa* kGradients[] = {
    &kBaselineAttentionGradient,
#if defined(__x86_64__)
    &kAvx2AttentionGradient,
    &kAvx512AttentionGradient,
    &kAvx512AttentionGradient,
    &kAvx512AttentionGradient,
#elif defined(__aarch64__)
    &kBaselineAttentionGradient,
#endif
};

constexpr int64_t kMinBlock = 64;
constexpr int64_t kMaxBlockKv = 1024;
constexpr int64_t kMaxBlockQ = 2048;
constexpr int64_t kDefaultBlockKv = 256;
constexpr int64_t kDefaultBlockQ = 512;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Below about 50 us of work, waking another thread costs more than it brings.
bool IsSmall(const AttentionArgs& a) {
  return 2.0 * a.batch * a.heads * a.q_len * a.kv_len * a.head_dim < 3.5e6;
}

int64_t Block(int64_t size, const AttentionConfig& config) {
  const int64_t wanted = config.block_kv > 0 ? config.block_kv : kDefaultBlockKv;
  const int64_t block = std::min(wanted, RoundUp(size, kMinBlock));
  return std::clamp(RoundUp(block, kMinBlock), kMinBlock, kMaxBlockKv);
}

// Rows of a task: as many as allowed, but several tasks for each thread, as they differ
// (causal ones by a factor of two) and other programs take time from some.
int64_t RowStep(int64_t tile_m, const AttentionArgs& args, int64_t rows,
                const AttentionConfig& config, int64_t threads) {
  const int64_t wanted = config.block_q > 0 ? config.block_q : kDefaultBlockQ;
  const int64_t most = std::clamp<int64_t>(wanted, 1, kMaxBlockQ);
  const int64_t heads = std::max<int64_t>(args.batch * args.kv_heads, 1);
  const int64_t tasks = threads <= 1 || IsSmall(args) ? 1 : threads * 4;
  const int64_t parts = std::max(CeilDiv(rows, most), CeilDiv(tasks, heads));
  // Every task packs all keys: that must pay.
  const int64_t fewest = std::min(most, 4 * tile_m);
  return std::max(RoundUp(CeilDiv(rows, parts), tile_m), fewest);
}

// See `Forward` in attention/common_impl.h.
int64_t WorkspaceBytes(const AttentionIsa& isa, const AttentionArgs& args,
                       const AttentionPlan& plan) {
  const int64_t rows = RoundUp(plan.row_step, kAttentionPad);
  const int64_t packed =
      (plan.block_kv + rows) * 2 * RoundUp(args.head_dim, kAttentionPad);
  const int64_t tiles = (isa.tiles_at_once + 1) * isa.tile_m * plan.block_kv;
  return 4 * (packed + tiles + (2 + 4) * rows);
}

// See `Gradient` in attention/gradient_common_impl.h.
int64_t GradientWorkspaceBytes(int64_t tile_m, const AttentionArgs& args,
                               const AttentionPlan& plan) {
  const int64_t rows = RoundUp(plan.row_step, kAttentionPad);
  const int64_t width = RoundUp(args.head_dim, kAttentionPad);
  const int64_t packed = (plan.block_kv + rows) * 4 * width + width;
  const int64_t tiles = 4 * tile_m * plan.block_kv;
  return 4 * (packed + tiles + (2 + 4) * rows + 2 * plan.block_kv);
}

// The tasks of one pass for all of a head; see `HeadGradient` in
// attention/gradient_head_impl.h.
AttentionPlan PlanHeads(int64_t tile_m, const AttentionArgs& args,
                        const AttentionConfig& config) {
  AttentionPlan plan{};
  plan.block_kv = Block(args.kv_len, config);
  plan.batch = args.batch;
  plan.kv_heads = args.kv_heads;
  const int64_t queries = RoundUp(std::max<int64_t>(args.q_len, 1), kAttentionPad);
  plan.rows = plan.row_step = std::min(queries, plan.block_kv);
  const int64_t width = RoundUp(args.head_dim, kAttentionPad);
  const int64_t kept = plan.row_step * (width + plan.block_kv);
  plan.workspace_bytes = GradientWorkspaceBytes(tile_m, args, plan) +
                         4 * (2 * args.kv_len * width + 2 * kept +
                              plan.row_step * kAttentionPad);
  return plan;
}

// The tasks of one pass: over `rows` rows a head of keys, each with `cols` columns.
AttentionPlan PlanPass(int64_t tile_m, const AttentionArgs& args, int64_t rows,
                       int64_t cols, const AttentionConfig& config, int64_t threads) {
  AttentionPlan plan{};
  plan.block_kv = Block(cols, config);
  plan.batch = args.batch;
  plan.kv_heads = args.kv_heads;
  plan.rows = rows;
  plan.row_step = RowStep(tile_m, args, std::max<int64_t>(rows, 1), config, threads);
  return plan;
}

}  // namespace

const AttentionIsa* UsableAttentionIsa(Isa wanted, DType type) {
  const Isa isa = UsableIsa(wanted);
#if defined(__x86_64__) && !defined(TRACEA_WITHOUT_AMX)
  if (isa == Isa::kAmx && type == DType::kBF16) return &kAmxAttention;
#endif
#if defined(__x86_64__) && !defined(TRACEA_WITHOUT_AVX512_BF16)
  if (isa == Isa::kAvx512Bf16 && type == DType::kBF16) return &kAvx512Bf16Attention;
#endif
  (void)type;
  return kAttentions[static_cast<int>(isa)];
}

const AttentionGradientIsa* UsableAttentionGradientIsa(Isa wanted, DType type) {
  const Isa isa = UsableIsa(wanted);
#if defined(__x86_64__) && !defined(TRACEA_WITHOUT_AMX)
  if (isa == Isa::kAmx && type == DType::kBF16) return &kAmxAttentionGradient;
#endif
#if defined(__x86_64__) && !defined(TRACEA_WITHOUT_AVX512_BF16)
  if (isa == Isa::kAvx512Bf16 && type == DType::kBF16) {
    return &kAvx512Bf16AttentionGradient;
  }
#endif
  (void)type;
  return kGradients[static_cast<int>(isa)];
}

AttentionPlan PlanAttention(const AttentionIsa& isa, const AttentionArgs& args,
                            const AttentionConfig& config, int64_t threads) {
  AttentionPlan plan = PlanPass(isa.tile_m, args, args.q_len * args.group(), args.kv_len,
                                config, threads);
  plan.workspace_bytes = WorkspaceBytes(isa, args, plan);
  return plan;
}

AttentionGradientPlan PlanAttentionGradient(const AttentionGradientIsa& isa,
                                            const AttentionGradientArgs& args,
                                            const AttentionConfig& config,
                                            int64_t threads) {
  const AttentionArgs& a = args.forward;
  AttentionGradientPlan plan{};
  if (config.passes == 1 && isa.head) {
    plan.heads = PlanHeads(isa.tile_m, a, config);
    plan.workspace_bytes = plan.heads.workspace_bytes;
    return plan;
  }
  plan.queries =
      PlanPass(isa.tile_m, a, a.q_len * a.group(), a.kv_len, config, threads);
  plan.keys = PlanPass(isa.tile_m, a, a.kv_len, a.q_len, config, threads);
  for (AttentionPlan* pass : {&plan.queries, &plan.keys}) {
    pass->workspace_bytes = GradientWorkspaceBytes(isa.tile_m, a, *pass);
    plan.workspace_bytes = std::max(plan.workspace_bytes, pass->workspace_bytes);
  }
  return plan;
}

void RunTask(const AttentionGradientIsa& isa, const AttentionGradientArgs& args,
             const AttentionGradientPlan& plan, int64_t task, float* workspace) {
  if (task < plan.heads.num_tasks()) {
    return isa.head(args, plan.heads.block_kv, plan.heads.range(task), workspace);
  }
  const int64_t of_keys = plan.keys.num_tasks();  // the longer ones first
  if (task < of_keys) {
    return isa.keys(args, plan.keys.block_kv, plan.keys.range(task), workspace);
  }
  isa.queries(args, plan.queries.block_kv, plan.queries.range(task - of_keys), workspace);
}

}  // namespace tracea::cpu
