// The matrix product of operands of any dtype, widened to f32, for one instruction set.
//
// Included by gemm/<isa>.cc as gemm/vectors_impl.h is.

#include "gemm/vectors_impl.h"
#include "gemm/skinny_impl.h"

template <typename T>
int64_t Bytes(const GemmArgs& args, const GemmBlocks& blocks) {
  if (blocks.skinny == Skinny::kNo) return GeneralBytes(args, blocks);
  return BytesOf<SkinnyBuffers>(FewRowsOf<T>(args, blocks), blocks);
}

int64_t GemmBytes(const GemmArgs& args, const GemmBlocks& blocks) {
  switch (args.in_type) {
    case DType::kF32:
      return Bytes<F32>(args, blocks);
    case DType::kBF16:
      return Bytes<BF16>(args, blocks);
    case DType::kF16:
      return Bytes<F16>(args, blocks);
  }
  return 0;
}

template <typename T>
void Run(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
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

void RunGemm(const GemmArgs& args, const GemmBlocks& blocks, const MatrixRange& range,
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
