// XLA FFI handlers of attention on the CPU and of its gradient;
// kernels/cpu/calls/attention_call.cc has their contracts.

#include "cpu_attention.h"

#include "calls/attention_call.h"
#include "cpu_call.h"

TRACEA_CPU_HANDLER(tracea_cpu_attention_v1, tracea::ParseAttention, tracea::RunAttention);

TRACEA_CPU_HANDLER(tracea_cpu_attention_gradient_v1, tracea::ParseAttention,
                   tracea::RunAttentionGradient);
