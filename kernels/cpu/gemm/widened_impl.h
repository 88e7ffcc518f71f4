// The matrix product of operands of any dtype, widened to f32, for one instruction set.
//
// Included by gemm/<isa>.cc as gemm/vectors_impl.h is.

#include "gemm/vectors_impl.h"
#include "gemm/skinny_impl.h"

template <typename T>
void Run(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
         float* workspace) {
  if (blocks.skinny == Skinny::kNo) return RunGeneral<T>(args, blocks, range, workspace);
  switch (blocks.skinny == Skinny::kRows ? args.m : args.n) {
    case 1:
      return RunSkinny<T, 1>(args, blocks, range, workspace);
    case 2:
      return RunSkinny<T, 2>(args, blocks, range, workspace);
    case 4:
      return RunSkinny<T, 4>(args, blocks, range, workspace);
    default:
      return RunSkinny<T, 0>(args, blocks, range, workspace);
  }
}

void RunGemm(const GemmArgs& args, const GemmBlocks& blocks, const GemmRange& range,
             float* workspace) {
  switch (args.in_type) {
    case DType::kF32:
      return Run<F32>(args, blocks, range, workspace);
    case DType::kBF16:
      return Run<BF16>(args, blocks, range, workspace);
    case DType::kF16:
      return Run<F16>(args, blocks, range, workspace);
  }
}
