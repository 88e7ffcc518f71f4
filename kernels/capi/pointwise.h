// Functions of each element, and reductions, on a CPU: what lies between the kernels of a
// program that are worth tuning. Each is a step of its own, in the arithmetic of C.

#ifndef TRACEA_KERNELS_CAPI_POINTWISE_H_
#define TRACEA_KERNELS_CAPI_POINTWISE_H_

#include <memory>

#include "graph.h"

namespace tracea::capi {

// out[i] = function(x[i], ...), each operand an array of out's size or one number.
//
// Numbers are computed in float, or in double if one of the arrays is, and rounded once.
std::unique_ptr<Action> MakeMap(Pool& pool, const Program& program, const Step& step);

// out[i, k] = sum, max or min over j of x[i, j, k].
std::unique_ptr<Action> MakeReduce(Pool& pool, const Program& program, const Step& step);

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_POINTWISE_H_
