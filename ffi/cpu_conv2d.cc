// XLA FFI handler of CPU convolutions and their gradients; kernels/cpu/calls/conv2d_call.cc
// has its contract.

#include "cpu_conv2d.h"

#include "calls/conv2d_call.h"
#include "cpu_call.h"

TRACEA_CPU_HANDLER(tracea_cpu_conv2d_v1, tracea::ParseConv, tracea::RunConv);
