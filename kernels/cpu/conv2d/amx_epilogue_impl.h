// The epilogue of a convolution on AMX tiles, beside the next tile product. A part of
// conv2d/amx_impl.h.
//
//   preactivation[i, j] = sums[i, j] + bias[j] + residual[i, j]
//   out[i, j]           = Op(preactivation[i, j])
//
// While the tiles multiply, the vector units finish a few rows of the block before: who
// multiplies calls Finish after each step, and Set once all sums of a block are there and
// nothing is pending. Sums, bias and places stay as they are until their rows are done.

// A block of sums whose epilogue is due, and how far it has come.
template <typename Op>
struct PendingRows {
  const ConvProduct& product;
  const float* sums = nullptr;   // of the next row, kAmxCols f32
  const float* bias = nullptr;   // of the columns
  const int64_t* out = nullptr;  // the next row's element, or below zero if of no use
  int64_t rows = 0, j = 0, cols = 0;
  bool simple = false;  // nothing but bias and activation is asked for

  TRACEA_INLINE void Set(const float* block, const float* its_bias, const int64_t* to,
                         int64_t num_rows, int64_t column, int64_t num_cols) {
    sums = block;
    bias = its_bias;
    out = to;
    rows = num_rows;
    j = column;
    cols = num_cols;
    simple = product.out_type == DType::kBF16 && !product.residual &&
             !product.preactivation && cols == kAmxCols;
    if (product.residual) PrefetchResidual();
  }

  // It is needed beside the next tile product.
  TRACEA_INLINE void PrefetchResidual() const {
    for (int64_t r = 0; r < rows; ++r) {
      if (out[r] < 0) continue;
      PrefetchElements(product.residual, product.residual_type, out[r] + j, cols);
    }
  }

  TRACEA_INLINE void Finish(int64_t most) {
    const int64_t count = Min(most, rows);
    rows -= count;
    for (int64_t r = 0; r < count; ++r, sums += kAmxCols, ++out) {
      if (*out < 0) continue;
      Vec low = Load(sums), high = Load(sums + kLanes);
      if (bias) {
        low += Load(bias);
        high += Load(bias + kLanes);
      }
      if (simple) {
        const __m512bh x = _mm512_cvtne2ps_pbh((__m512)Op::Apply(high),
                                               (__m512)Op::Apply(low));
        StoreHalves((BF16*)product.out + *out + j, (Half32)x);
      } else {
        FinishRow(low, high, *out + j);
      }
    }
  }

  __attribute__((noinline)) void FinishRow(Vec low, Vec high, int64_t to) const {
    if (product.residual) {
      low += LoadAs(product.residual_type, product.residual, to, cols);
      if (cols > kLanes) {
        high +=
            LoadAs(product.residual_type, product.residual, to + kLanes, cols - kLanes);
      }
    }
    if (product.preactivation) {
      StorePair(product.out_type, product.preactivation, to, low, high, cols);
    }
    StorePair(product.out_type, product.out, to, Op::Apply(low), Op::Apply(high), cols);
  }
};

// The columns of the bias that are a column strip's, as f32.
void LoadConvBias(const ConvProduct& product, const Block& block, float* to) {
  if (!product.bias) return;
  for (int64_t c = 0; c < block.cols; c += kLanes) {
    Store(to + c, LoadAs(product.bias_type, product.bias, block.j0 + c, block.cols - c));
  }
}
