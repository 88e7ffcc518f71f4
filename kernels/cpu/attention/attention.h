// CPU attention without any XLA type, and its gradient:
//
//   o = softmax(scale * q @ k' + bias, where allowed) @ v, for each head
//
// Scores are computed block by block of the keys and never stored: a running maximum and
// a running sum of each query's weights correct what was summed before (online softmax).
// Sums are f32; operands of 16 bits are widened, or multiplied by matrix units. The bits
// of a result depend on shape, arguments, instruction set, the width of these blocks and
// the gradient's passes, but neither on the split into tasks nor on the number of threads.
//
// A kernel exists once per instruction set (`AttentionIsa`). It computes some rows of one
// head on the calling thread and neither allocates nor throws; `PlanAttention` says how
// to cut a problem into such tasks and how much workspace each needs.

#ifndef TRACEA_KERNELS_CPU_ATTENTION_ATTENTION_H_
#define TRACEA_KERNELS_CPU_ATTENTION_ATTENTION_H_

#include <cstdint>

#include "common/isa.h"
#include "common/memory.h"
#include "common/types.h"

namespace tracea::cpu {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kAttentionBlock = 64;  // blocks of keys are multiples of it

// Query i sees keys j with i - left <= j <= i + right, j <= i if causal, and j below its
// example's number of keys. Queries from its number of queries on see none and give zero;
// others that see none give the mean of all values.
struct AttentionArgs {
  const void* q;               // (batch, q_len, heads, head_dim)
  const void* k;               // (batch, kv_len, kv_heads, head_dim)
  const void* v;               // as k
  void* out;                   // as q
  void* lse;                   // (batch, heads, q_len), log-sum-exp of scores; or null
  const void* bias;            // or null; element (b, h, i, j) by bias_strides
  const uint8_t* mask;         // or null; zero forbids; by mask_strides
  const int32_t* q_lengths;    // (batch,) or null
  const int32_t* kv_lengths;   // (batch,) or null
  int64_t batch, q_len, kv_len, heads, kv_heads, head_dim;
  int64_t bias_strides[4], mask_strides[4];  // in elements; 0 where broadcast
  int64_t left, right;                       // kUnlimited for no window
  DType type;                                // of q, k, v, out
  DType bias_type, lse_type;
  float scale;
  bool causal;

  int64_t group() const { return heads / kv_heads; }  // heads that share keys
};

// The gradient's operands: those of the forward pass without a bias, of which `out` and
// `lse` (f32) are inputs now.
struct AttentionGradientArgs {
  AttentionArgs forward;
  const void* dout;  // as q: the output's cotangent
  void* dq;          // as q
  void* dk;          // as k
  void* dv;          // as k
};

constexpr int64_t kUnlimited = int64_t{1} << 40;

// The free choices; 0 means the default. Only block_kv and passes change the rounding.
struct AttentionConfig {
  int64_t block_q;   // most rows of a task
  int64_t block_kv;  // keys packed at a time
  int64_t passes;    // of the gradient: 1 or 2
};

// One task: rows [row0, row1) of the queries that share a head of keys. Row r is query
// r / group of that head's group member r % group.
struct AttentionRange {
  int64_t batch, kv_head, row0, row1;
};

// One kernel: `run`, and the bytes that it lays out for ranges of at most so many rows.
template <typename Args>
struct AttentionKernel {
  void (*run)(const Args& args, int64_t block, const AttentionRange& range,
              float* workspace);
  int64_t (*workspace_bytes)(const Args& args, int64_t block, int64_t rows);
};

struct AttentionIsa {
  Isa isa;
  int64_t tile_m, tile_n;  // register tile, in elements
  AttentionKernel<AttentionArgs> forward;
  bool only_bf16 = false;
};

// The gradient is computed in two passes, which both compute the weights once more: one
// task gets dq of some rows, or dk and dv of some keys (`row0` and `row1` count keys
// then). So no two tasks add to the same sum. Or in one pass, where all of a head of keys
// is one task, which takes row1 - row0 queries at a time.
struct AttentionGradientIsa {
  Isa isa;
  int64_t tile_m, tile_n;
  AttentionKernel<AttentionGradientArgs> queries, keys;
  AttentionKernel<AttentionGradientArgs> head;  // of nulls if there is none
  bool only_bf16 = false;
};

// How a problem is cut into tasks.
struct AttentionPlan {
  int64_t block_kv;  // or queries that a task of the gradient's keys packs at a time
  int64_t batch, kv_heads, rows, row_step;
  int64_t workspace_bytes;  // for one running task, 64-byte aligned

  int64_t num_row_blocks() const { return rows == 0 ? 0 : (rows - 1) / row_step + 1; }
  int64_t num_tasks() const { return batch * kv_heads * num_row_blocks(); }

  // Later rows come first: causal ones see most keys.
  AttentionRange range(int64_t task) const {
    const int64_t heads = batch * kv_heads;
    const int64_t row0 = (num_row_blocks() - 1 - task / heads) * row_step;
    const int64_t row1 = rows - row0 < row_step ? rows : row0 + row_step;
    return {task % heads / kv_heads, task % kv_heads, row0, row1};
  }
};

AttentionPlan PlanAttention(const AttentionIsa& isa, const AttentionArgs& args,
                            const AttentionConfig& config, int64_t threads);

// The tasks of the gradient: those of one pass or those of two.
struct AttentionGradientPlan {
  AttentionPlan queries, keys, heads;
  int64_t workspace_bytes;  // for one running task of any kind

  int64_t num_tasks() const {
    return queries.num_tasks() + keys.num_tasks() + heads.num_tasks();
  }
};

void RunTask(const AttentionGradientIsa& isa, const AttentionGradientArgs& args,
             const AttentionGradientPlan& plan, int64_t task, float* workspace);

AttentionGradientPlan PlanAttentionGradient(const AttentionGradientIsa& isa,
                                            const AttentionGradientArgs& args,
                                            const AttentionConfig& config,
                                            int64_t threads);

// The kernels of the best instruction set for these operands, `wanted` at most, that
// build and machine have.
const AttentionIsa* UsableAttentionIsa(Isa wanted, DType type);
const AttentionGradientIsa* UsableAttentionGradientIsa(Isa wanted, DType type);

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_ATTENTION_ATTENTION_H_
