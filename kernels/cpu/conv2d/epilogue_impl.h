// The epilogue of a convolution, on rows of f32 that lie in L1. A part of
// conv2d/vectors_impl.h.

// Rows of f32, and where each goes: element out[row] + j of the result.
struct ConvTile {
  const float* data;
  int64_t stride;
  const int64_t* out;
  int64_t rows, j, cols;  // data holds whole vectors; the first `cols` columns are meant
};

// Bias (f32, or null), residual, preactivation, activation, store.
template <typename Op>
void FinishConvWith(const ConvProduct& product, const ConvTile& tile, const float* bias) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t to = tile.out[row] + tile.j;
    for (int64_t c = 0; c < tile.cols; c += kLanes) {
      const int64_t count = tile.cols - c;
      Vec x = Load(tile.data + row * tile.stride + c);
      if (bias) x += Load(bias + c);
      if (product.residual) {
        x += LoadAs(product.residual_type, product.residual, to + c, count);
      }
      if (product.preactivation) {
        StoreAs(product.out_type, product.preactivation, to + c, x, count);
      }
      StoreAs(product.out_type, product.out, to + c, Op::Apply(x), count);
    }
  }
}

void FinishConv(const ConvProduct& product, const ConvTile& tile, const float* bias) {
  switch (product.activation) {
    case Activation::kNone:
      return FinishConvWith<Identity>(product, tile, bias);
    case Activation::kRelu:
      return FinishConvWith<Relu>(product, tile, bias);
    case Activation::kGelu:
      return FinishConvWith<Gelu>(product, tile, bias);
    case Activation::kGeluExact:
      return FinishConvWith<GeluExact>(product, tile, bias);
    case Activation::kSilu:
      return FinishConvWith<Silu>(product, tile, bias);
  }
}

// Columns [j, j + cols) of the bias as f32, or null if there is none. `to` has room for
// whole tiles.
const float* LoadConvBias(const ConvProduct& product, int64_t j, int64_t cols,
                          float* to) {
  if (!product.bias) return nullptr;
  for (int64_t c = 0; c < cols; c += kLanes) {
    Store(to + c, LoadAs(product.bias_type, product.bias, j + c, cols - c));
  }
  return to;
}

bool IsPlainConv(const ConvProduct& product) {
  return product.out_type == DType::kF32 && product.activation == Activation::kNone &&
         !product.bias && !product.residual && !product.preactivation;
}
