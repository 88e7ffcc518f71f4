// Calls of attention on the CPU and of its gradient; see attention_call.cc for their
// contracts.

#ifndef TRACEA_KERNELS_CPU_CALLS_ATTENTION_CALL_H_
#define TRACEA_KERNELS_CPU_CALLS_ATTENTION_CALL_H_

#include "attention/attention.h"
#include "calls/call.h"

namespace tracea {

struct AttentionOptions {
  bool has_bias = false, has_mask = false, has_q_lengths = false, has_kv_lengths = false;
  cpu::Isa isa = cpu::kBestIsa;
  cpu::AttentionConfig config{0, 0, 1};
  float scale = 1;
  bool is_causal = false;
  int64_t left = cpu::kUnlimited, right = cpu::kUnlimited;

  size_t operands() const {
    return 3 + has_bias + has_mask + has_q_lengths + has_kv_lengths;
  }
};

AttentionOptions ParseAttention(const Attributes& attrs);

void RunAttention(Pool& pool, const AttentionOptions& options, Arrays operands,
                  Arrays results);

void RunAttentionGradient(Pool& pool, const AttentionOptions& options, Arrays operands,
                          Arrays results);

}  // namespace tracea

#endif  // TRACEA_KERNELS_CPU_CALLS_ATTENTION_CALL_H_
