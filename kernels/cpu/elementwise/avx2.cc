// Elementwise functions for AVX2.

#include "elementwise/elementwise.h"

#include <immintrin.h>
#include <string.h>

namespace tracea::cpu {
namespace {
#include "elementwise/loop_impl.h"
}  // namespace

extern const ElementwiseIsa kAvx2Elementwise;
const ElementwiseIsa kAvx2Elementwise = {Isa::kAvx2, FindElementwise};

}  // namespace tracea::cpu
