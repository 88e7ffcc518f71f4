// Around the attention kernels, compiled without any instruction set flag: choice of
// instruction set, split into tasks, workspace.

#include "attention.h"

#include <algorithm>
#include <cstdint>

namespace tracea::cpu {

extern const AttentionIsa kBaselineAttention;
#if defined(__x86_64__)
extern const AttentionIsa kAvx2Attention;
extern const AttentionIsa kAvx512Attention;
#if !defined(TRACEA_WITHOUT_AMX)
extern const AttentionIsa kAmxAttention;
#endif
#endif

namespace {

// By Isa; AMX helps some dtypes only.
constexpr const AttentionIsa* kAttentions[] = {
    &kBaselineAttention,
#if defined(__x86_64__)
    &kAvx2Attention,
    &kAvx512Attention,
    &kAvx512Attention,
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

int64_t BlockKv(const AttentionArgs& args, const AttentionConfig& config) {
  const int64_t wanted = config.block_kv > 0 ? config.block_kv : kDefaultBlockKv;
  const int64_t block = std::min(wanted, RoundUp(args.kv_len, kMinBlock));
  return std::clamp(RoundUp(block, kMinBlock), kMinBlock, kMaxBlockKv);
}

// Rows of a task: as many as allowed, but several tasks for each thread, as they differ
// (causal ones by a factor of two) and other programs take time from some.
int64_t RowStep(const AttentionIsa& isa, const AttentionArgs& args, int64_t rows,
                const AttentionConfig& config, int64_t threads) {
  const int64_t wanted = config.block_q > 0 ? config.block_q : kDefaultBlockQ;
  const int64_t most = std::clamp<int64_t>(wanted, 1, kMaxBlockQ);
  const int64_t heads = std::max<int64_t>(args.batch * args.kv_heads, 1);
  const int64_t tasks = threads <= 1 || IsSmall(args) ? 1 : threads * 4;
  const int64_t parts = std::max(CeilDiv(rows, most), CeilDiv(tasks, heads));
  // Every task packs all keys: that must pay.
  const int64_t fewest = std::min(most, 4 * isa.tile_m);
  return std::max(RoundUp(CeilDiv(rows, parts), isa.tile_m), fewest);
}

// See `Forward` in attention_common_impl.h.
int64_t WorkspaceBytes(const AttentionIsa& isa, const AttentionArgs& args,
                       const AttentionPlan& plan) {
  const int64_t rows = RoundUp(plan.row_step, kAttentionPad);
  const int64_t packed =
      (plan.block_kv + rows) * 2 * RoundUp(args.head_dim, kAttentionPad);
  const int64_t tiles = 2 * isa.tile_m * plan.block_kv;
  return 4 * (packed + tiles + (2 + 4) * rows);
}

}  // namespace

const AttentionIsa* UsableAttentionIsa(Isa wanted, DType type) {
  const Isa isa = UsableIsa(wanted);
#if defined(__x86_64__) && !defined(TRACEA_WITHOUT_AMX)
  if (isa == Isa::kAmx && type == DType::kBF16) return &kAmxAttention;
#endif
  (void)type;
  return kAttentions[static_cast<int>(isa)];
}

AttentionPlan PlanAttention(const AttentionIsa& isa, const AttentionArgs& args,
                            const AttentionConfig& config, int64_t threads) {
  AttentionPlan plan{};
  plan.block_kv = BlockKv(args, config);
  plan.batch = args.batch;
  plan.kv_heads = args.kv_heads;
  plan.rows = args.q_len * args.group();
  plan.row_step = RowStep(isa, args, std::max<int64_t>(plan.rows, 1), config, threads);
  plan.workspace_bytes = WorkspaceBytes(isa, args, plan);
  return plan;
}

}  // namespace tracea::cpu
