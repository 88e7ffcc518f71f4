// One register tile of a convolution's product. A part of conv2d_impl.h.

// The memory that a task works in; `WorkspaceBytes` in conv2d.cc adds it up.
constexpr int kLineRows = kTileM < 8 ? 8 : kTileM;  // lines also keep a block's windows

struct ConvWorkspace {
  float *rhs, *lhs, *bias, *lines, *sums;

  ConvWorkspace(const ConvBlocks& blocks, float* memory) {
    rhs = memory;
    lhs = rhs + blocks.kc * blocks.nc;
    bias = lhs + kTileM * (blocks.kc + kChunk);
    lines = bias + blocks.nc;
    sums = lines + kLineRows * (blocks.kc + kChunk);
  }
};

// f32 sums between blocks: row m, column j at data[m * stride + j].
struct ConvSums {
  float* data;
  int64_t stride;
  bool padded;  // whole tiles may be written, beyond the last column
};

struct ConvBlock {
  int64_t m0, m1, j0, cols, p, depth;
  bool first, last;  // of the blocks of depth
};

TRACEA_INLINE void CopyTile(const float* from, int64_t from_stride, float* to,
                            int64_t to_stride, int64_t rows, int64_t cols) {
  for (int64_t row = 0; row < rows; ++row) {
    memcpy(to + row * to_stride, from + row * from_stride, cols * sizeof(float));
  }
}

// The register tile at (m, j0 + c): product, then partial store or epilogue.
TRACEA_INLINE void RunConvTile(const ConvProduct& product, const ConvBlock& block,
                               const ConvSums& partial, const int64_t* out, int64_t m,
                               int64_t rows, int64_t c, const float* lhs,
                               const float* rhs, const float* bias) {
  alignas(64) float buffer[kTileM * kTileN];
  const int64_t cols = Min(kTileN, block.cols - c);
  const int64_t j = block.j0 + c;
  const bool whole = cols == kTileN || partial.padded;
  float* sums = partial.data ? partial.data + m * partial.stride + j : nullptr;
  const MicroKernelFn micro = kMicroKernels.table[cols > kLanes][rows - 1];

  const float* src = block.first ? nullptr : sums;
  int64_t src_stride = partial.stride;
  if (src && !whole) {
    CopyTile(sums, partial.stride, buffer, kTileN, rows, cols);
    src = buffer;
    src_stride = kTileN;
  }
  const bool in_place = sums && !partial.padded;
  const bool direct =
      block.last ? in_place && cols == kTileN && IsPlainConv(product) : whole;
  if (direct) {
    micro(block.depth, lhs, rhs, src, src_stride, sums, partial.stride);
    return;
  }
  micro(block.depth, lhs, rhs, src, src_stride, buffer, kTileN);
  if (block.last) {
    FinishConv(product, ConvTile{buffer, kTileN, out, rows, j, cols},
               bias ? bias + c : nullptr);
  } else {
    CopyTile(buffer, kTileN, sums, partial.stride, rows, cols);
  }
}
