// Elementwise functions for the 128-bit vectors that every x86-64 (SSE2) and every aarch64
// (NEON) has.

#include "elementwise/elementwise.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tracea::cpu {
namespace {
#include "elementwise/loop_impl.h"
}  // namespace

extern const ElementwiseIsa kBaselineElementwise;
const ElementwiseIsa kBaselineElementwise = {Isa::kBaseline, FindElementwise};

}  // namespace tracea::cpu
