// Attention and its gradient for operands of any dtype, widened to f32.
//
// Included by attention/<isa>.cc as attention/vectors_impl.h is.

#include "attention/vectors_impl.h"
#include "attention/gradient_vectors_impl.h"

void RunAttention(const AttentionArgs& args, int64_t block_kv,
                  const AttentionRange& range, float* workspace) {
  switch (args.type) {
    case DType::kF32:
      return RunTiled<F32>(args, block_kv, range, workspace);
    case DType::kBF16:
      return RunTiled<BF16>(args, block_kv, range, workspace);
    case DType::kF16:
      return RunTiled<F16>(args, block_kv, range, workspace);
  }
}

void RunGradientOfQueries(const AttentionGradientArgs& args, int64_t block,
                          const AttentionRange& range, float* workspace) {
  switch (args.forward.type) {
    case DType::kF32:
      return RunTiledOfQueries<F32>(args, block, range, workspace);
    case DType::kBF16:
      return RunTiledOfQueries<BF16>(args, block, range, workspace);
    case DType::kF16:
      return RunTiledOfQueries<F16>(args, block, range, workspace);
  }
}

void RunGradientOfKeys(const AttentionGradientArgs& args, int64_t block,
                       const AttentionRange& range, float* workspace) {
  switch (args.forward.type) {
    case DType::kF32:
      return RunTiledOfKeys<F32>(args, block, range, workspace);
    case DType::kBF16:
      return RunTiledOfKeys<BF16>(args, block, range, workspace);
    case DType::kF16:
      return RunTiledOfKeys<F16>(args, block, range, workspace);
  }
}

void RunGradientOfHead(const AttentionGradientArgs& args, int64_t block,
                       const AttentionRange& range, float* workspace) {
  switch (args.forward.type) {
    case DType::kF32:
      return RunTiledOfHead<F32>(args, block, range, workspace);
    case DType::kBF16:
      return RunTiledOfHead<BF16>(args, block, range, workspace);
    case DType::kF16:
      return RunTiledOfHead<F16>(args, block, range, workspace);
  }
}
