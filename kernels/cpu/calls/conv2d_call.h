// Calls of CPU convolutions; see conv2d_call.cc for their contract.

#ifndef TRACEA_KERNELS_CPU_CALLS_CONV2D_CALL_H_
#define TRACEA_KERNELS_CPU_CALLS_CONV2D_CALL_H_

#include "calls/call.h"
#include "conv2d/conv2d.h"

namespace tracea {

struct ConvOptions {
  cpu::ConvDirection direction = cpu::ConvDirection::kForward;
  cpu::ConvExtent height{}, width{};  // without sizes
  int64_t groups = 1;
  cpu::Activation activation = cpu::Activation::kNone;
  bool has_bias = false, has_residual = false, save_preactivation = false;
  const cpu::ConvIsa* isa = nullptr;
  cpu::ConvConfig config{};
};

ConvOptions ParseConv(const Attributes& attrs);

void RunConv(Pool& pool, const ConvOptions& options, Arrays operands, Arrays results);

}  // namespace tracea

#endif  // TRACEA_KERNELS_CPU_CALLS_CONV2D_CALL_H_
