// Convolutions of operands of any dtype, widened to f32, for one instruction set.
//
// Included by conv2d/<isa>.cc as conv2d/vectors_impl.h is.

#include "conv2d/vectors_impl.h"
#include "conv2d/depthwise_impl.h"

void RunConv(const ConvProduct& product, const ConvBlocks& blocks, const MatrixRange& range,
             float* workspace) {
  switch (product.in_type) {
    case DType::kF32:
      return RunConvAs<F32>(product, blocks, range, workspace);
    case DType::kBF16:
      return RunConvAs<BF16>(product, blocks, range, workspace);
    case DType::kF16:
      return RunConvAs<F16>(product, blocks, range, workspace);
  }
}

void RunWeightGrad(const ConvProduct& product, const ConvBlocks& blocks,
                   const MatrixRange& range, float* workspace) {
  switch (product.in_type) {
    case DType::kF32:
      return RunWeightGradAs<F32>(product, blocks, range, workspace);
    case DType::kBF16:
      return RunWeightGradAs<BF16>(product, blocks, range, workspace);
    case DType::kF16:
      return RunWeightGradAs<F16>(product, blocks, range, workspace);
  }
}
