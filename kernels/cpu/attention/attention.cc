// Around the attention kernels, compiled without any instruction set flag: choice of
// instruction set, split into tasks, workspace.

#include "attention/attention.h"

#include <algorithm>
#include <cstdint>

#include "common/blocking.h"
#include "common/ladder.h"

namespace tracea::cpu {

extern const AttentionIsa kBaselineAttention, kAvx2Attention, kAvx512Attention,
    kAvx512Bf16Attention, kAmxAttention;
extern const AttentionGradientIsa kBaselineAttentionGradient, kAvx2AttentionGradient,
    kAvx512AttentionGradient, kAvx512Bf16AttentionGradient, kAmxAttentionGradient;

namespace {

constexpr Ladder<AttentionIsa> kAttentions =
    TRACEA_LADDER(&kBaselineAttention, &kAvx2Attention, &kAvx512Attention,
                  &kAvx512Bf16Attention, &kAmxAttention, nullptr);

constexpr Ladder<AttentionGradientIsa> kGradients =
    TRACEA_LADDER(&kBaselineAttentionGradient, &kAvx2AttentionGradient,
                  &kAvx512AttentionGradient, &kAvx512Bf16AttentionGradient,
                  &kAmxAttentionGradient, nullptr);

// AVX-512 BF16 and AMX are for bf16 only.
template <typename Kernels>
const Kernels* BestFor(const Ladder<Kernels>& ladder, Isa wanted, DType type) {
  return ladder.Best(wanted, [type](const Kernels& kernels) {
    return type == DType::kBF16 || !kernels.only_bf16;
  });
}

constexpr int64_t kMaxBlockKv = 1024;
constexpr int64_t kMaxBlockQ = 2048;
constexpr int64_t kDefaultBlockKv = 256;
constexpr int64_t kDefaultBlockQ = 512;
constexpr int64_t kQueryUnit = 32;  // of the queries that a pass for all of a head takes

// Below about 50 us of work, waking another thread costs more than it brings.
bool IsSmall(const AttentionArgs& a) {
  return 2.0 * a.batch * a.heads * a.q_len * a.kv_len * a.head_dim < 3.5e6;
}

int64_t Block(int64_t size, const AttentionConfig& config) {
  const int64_t wanted = config.block_kv > 0 ? config.block_kv : kDefaultBlockKv;
  const int64_t block = std::min(wanted, RoundUp(size, kAttentionBlock));
  return std::clamp(RoundUp(block, kAttentionBlock), kAttentionBlock, kMaxBlockKv);
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

// The tasks of one pass for all of a head, which takes `row_step` queries at a time.
AttentionPlan PlanHeads(const AttentionArgs& args, const AttentionConfig& config) {
  AttentionPlan plan{};
  plan.block_kv = Block(args.kv_len, config);
  plan.batch = args.batch;
  plan.kv_heads = args.kv_heads;
  const int64_t queries = RoundUp(std::max<int64_t>(args.q_len, 1), kQueryUnit);
  plan.rows = plan.row_step = std::min(queries, plan.block_kv);
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

// The workspace of one kernel's tasks, which all kernels of the gradient share.
void Reserve(const AttentionKernel<AttentionGradientArgs>& kernel,
             const AttentionGradientArgs& args, AttentionPlan* tasks,
             AttentionGradientPlan* plan) {
  tasks->workspace_bytes = kernel.workspace_bytes(args, tasks->block_kv, tasks->row_step);
  plan->workspace_bytes = std::max(plan->workspace_bytes, tasks->workspace_bytes);
}

}  // namespace

const AttentionIsa* UsableAttentionIsa(Isa wanted, DType type) {
  return BestFor(kAttentions, wanted, type);
}

const AttentionGradientIsa* UsableAttentionGradientIsa(Isa wanted, DType type) {
  return BestFor(kGradients, wanted, type);
}

AttentionPlan PlanAttention(const AttentionIsa& isa, const AttentionArgs& args,
                            const AttentionConfig& config, int64_t threads) {
  AttentionPlan plan = PlanPass(isa.tile_m, args, args.q_len * args.group(), args.kv_len,
                                config, threads);
  plan.workspace_bytes =
      isa.forward.workspace_bytes(args, plan.block_kv, plan.row_step);
  return plan;
}

AttentionGradientPlan PlanAttentionGradient(const AttentionGradientIsa& isa,
                                            const AttentionGradientArgs& args,
                                            const AttentionConfig& config,
                                            int64_t threads) {
  const AttentionArgs& a = args.forward;
  AttentionGradientPlan plan{};
  if (config.passes == 1 && isa.head.run) {
    plan.heads = PlanHeads(a, config);
    Reserve(isa.head, args, &plan.heads, &plan);
    return plan;
  }
  plan.queries =
      PlanPass(isa.tile_m, a, a.q_len * a.group(), a.kv_len, config, threads);
  plan.keys = PlanPass(isa.tile_m, a, a.kv_len, a.q_len, config, threads);
  Reserve(isa.queries, args, &plan.queries, &plan);
  Reserve(isa.keys, args, &plan.keys, &plan);
  return plan;
}

void RunTask(const AttentionGradientIsa& isa, const AttentionGradientArgs& args,
             const AttentionGradientPlan& plan, int64_t task, float* workspace) {
  if (task < plan.heads.num_tasks()) {
    return isa.head.run(args, plan.heads.block_kv, plan.heads.range(task), workspace);
  }
  const int64_t of_keys = plan.keys.num_tasks();  // the longer ones first
  if (task < of_keys) {
    return isa.keys.run(args, plan.keys.block_kv, plan.keys.range(task), workspace);
  }
  isa.queries.run(args, plan.queries.block_kv, plan.queries.range(task - of_keys),
                  workspace);
}

}  // namespace tracea::cpu
