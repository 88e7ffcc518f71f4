// One register tile of a convolution's product. A part of conv2d/vectors_impl.h.

// Whether sums wait between blocks of depth in the result: they are f32, and rows of the
// product are consecutive pixels there.
bool KeepsInPlace(const ConvProduct& product) {
  const bool in_order = product.y.out_step == 1 && product.x.out_step == 1;
  return product.out_type == DType::kF32 && in_order;
}

// Whether they wait in the workspace.
bool BuffersSums(const ConvProduct& product, const ConvBlocks& blocks, int64_t depth) {
  return !KeepsInPlace(product) && blocks.kc < depth;
}

// What every product of packed operands needs.
struct ConvBuffers {
  float *rhs, *lhs, *bias;
  float* sums;  // partial sums; null unless they wait here

  ConvBuffers(const ConvBlocks& blocks, bool buffers_sums, Workspace& space) {
    const int64_t words = WordsIn(blocks.kc);
    rhs = space.Take<float>(words * blocks.nc);
    lhs = space.Take<float>(kLhsStep * (words + kChunk));
    bias = space.Take<float>(blocks.nc);
    sums = buffers_sums ? space.Take<float>(blocks.mc * blocks.nc) : nullptr;
  }
};

constexpr int64_t kMostSums = int64_t{4} << 20;  // bytes of a row strip

// f32 sums between blocks: row m, column j at data[m * stride + j].
struct ConvSums {
  float* data;
  int64_t stride;
  bool padded;  // whole tiles may be written, beyond the last column
};

// Those of a block: none that are ever read if the block is all of the depth.
ConvSums SumsOf(const ConvProduct& product, const ConvBuffers& buffers,
                const Block& block, int64_t nc) {
  if (buffers.sums) return {buffers.sums - block.i0 * nc - block.j0, nc, true};
  if (!KeepsInPlace(product)) return {nullptr, 0, true};
  return {(float*)product.out, product.out_pixel, false};
}

// Rows of a product's result: `count` of them, and where each lies.
struct ConvRows {
  const int64_t* row;  // of the product, ascending
  const int64_t* out;  // elements
  int64_t count;

  bool neighbours() const { return row[count - 1] - row[0] == count - 1; }
};

void LoadSums(const ConvSums& sums, const ConvRows& rows, int64_t j, int64_t cols,
              float* tile) {
  for (int64_t i = 0; i < rows.count; ++i) {
    memcpy(tile + i * kTileN, sums.data + rows.row[i] * sums.stride + j,
           cols * sizeof(float));
  }
}

void StoreSums(const ConvSums& sums, const ConvRows& rows, int64_t j, int64_t cols,
               const float* tile) {
  for (int64_t i = 0; i < rows.count; ++i) {
    memcpy(sums.data + rows.row[i] * sums.stride + j, tile + i * kTileN,
           cols * sizeof(float));
  }
}

// Brings closer what a tile will read after its product, and where it will store f32:
// lines of 16-bit results are soon whole, and do not wait.
TRACEA_INLINE void PrefetchTile(const ConvProduct& product, const ConvRows& rows,
                                int64_t j, int64_t cols) {
  const DType type = product.out_type;
  const bool waits = type == DType::kF32;
  if (!product.residual && !waits) return;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t at = rows.out[i] + j;
    if (product.residual) {
      PrefetchElements(product.residual, product.residual_type, at, cols);
    }
    if (!waits) continue;
    PrefetchElements(product.out, type, at, cols);
    if (product.preactivation) PrefetchElements(product.preactivation, type, at, cols);
  }
}

// One register tile: columns [j0 + c, ...) of these rows. Their sums so far, the product,
// then partial store or epilogue. multiply(vecs, src, src_stride, dst, dst_stride) writes
// src plus the product.
template <typename Multiply>
TRACEA_INLINE void RunConvTile(const ConvProduct& product, const Block& block,
                               const ConvSums& partial, const ConvRows& rows, int64_t c,
                               const float* bias, const Multiply& multiply) {
  alignas(64) float buffer[kTileM * kTileN];
  const int64_t cols = Min(kTileN, block.cols - c);
  const int64_t j = block.j0 + c;
  const int vecs = cols > kLanes ? 2 : 1;
  const bool whole = (cols == kTileN || partial.padded) && rows.neighbours();
  float* sums = partial.data ? partial.data + rows.row[0] * partial.stride + j : nullptr;
  if (block.last) PrefetchTile(product, rows, j, cols);

  const float* src = block.first ? nullptr : sums;
  int64_t src_stride = partial.stride;
  if (src && !whole) {
    LoadSums(partial, rows, j, cols, buffer);
    src = buffer;
    src_stride = kTileN;
  }
  const bool in_place = sums && !partial.padded;
  if (block.last ? whole && in_place && IsPlainConv(product) : whole) {
    multiply(vecs, src, src_stride, sums, partial.stride);
    return;
  }
  multiply(vecs, src, src_stride, buffer, kTileN);
  if (block.last) {
    FinishConv(product, ConvTile{buffer, kTileN, rows.out, rows.count, j, cols},
               bias ? bias + c : nullptr);
  } else {
    StoreSums(partial, rows, j, cols, buffer);
  }
}

// The tiles of packed lhs rows, `words` deep, one for each panel of packed weights.
TRACEA_INLINE void RunPackedRows(const ConvProduct& product, const Block& block,
                                 const ConvSums& partial, const ConvRows& rows,
                                 int64_t words, const float* lhs, const float* weights,
                                 const float* bias, LhsOrder order = kByRow) {
  for (int64_t c = 0; c < block.cols; c += kTileN) {
    const float* rhs = weights + c * WordsIn(block.kc);
    RunConvTile(product, block, partial, rows, c, bias,
                [&](int vecs, const float* src, int64_t src_stride, float* dst,
                    int64_t dst_stride) {
                  kMicroKernels.table[order][vecs - 1][rows.count - 1](
                      words, lhs, rhs, src, src_stride, dst, dst_stride, nullptr);
                });
  }
}
