// The epilogue, on a tile of f32 that lies in L1. A part of gemm/vectors_impl.h.

#include "common/element_impl.h"

// A block of f32 of up to kTileN columns and where it lies in the output.
struct Tile {
  float* data;
  int64_t stride;
  int64_t i, j;        // of its first element, in the output
  int64_t rows, cols;  // data holds whole vectors; the first `cols` columns are meant
};

// Bias (kTileN f32, or null), preactivation, activation, residual, store.
template <typename Op>
void FinishWith(const GemmArgs& args, const Tile& tile, const float* bias) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t to = (tile.i + row) * args.out_stride + tile.j;
    const int64_t from = (tile.i + row) * args.residual_stride + tile.j;
    for (int64_t c = 0; c < tile.cols; c += kLanes) {
      const int64_t count = tile.cols - c;
      Vec x = Load(tile.data + row * tile.stride + c);
      if (bias) x += Load(bias + c);
      if (args.preactivation) {
        StoreAs(args.out_type, args.preactivation, to + c, x, count);
      }
      x = Op::Apply(x);
      if (args.residual) {
        const Vec residual = LoadAs(args.residual_type, args.residual, from + c, count);
        x = args.residual_op == ResidualOp::kMultiply ? x * residual : x + residual;
      }
      StoreAs(args.out_type, args.out, to + c, x, count);
    }
  }
}

inline void Finish(const GemmArgs& args, const Tile& tile, const float* bias) {
  switch (args.activation) {
    case Activation::kNone:
      return FinishWith<Identity>(args, tile, bias);
    case Activation::kRelu:
      return FinishWith<Relu>(args, tile, bias);
    case Activation::kGelu:
      return FinishWith<Gelu>(args, tile, bias);
    case Activation::kGeluExact:
      return FinishWith<GeluExact>(args, tile, bias);
    case Activation::kSilu:
      return FinishWith<Silu>(args, tile, bias);
  }
}

// Columns [j, j + cols) of the bias as f32, or null if there is none. `to` has room for
// whole tiles.
inline const float* LoadBias(const GemmArgs& args, int64_t j, int64_t cols, float* to) {
  if (!args.bias) return nullptr;
  for (int64_t c = 0; c < cols; c += kLanes) {
    Store(to + c, LoadAs(args.bias_type, args.bias, j + c, cols - c));
  }
  return to;
}
