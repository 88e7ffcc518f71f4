// The gradient of a convolution's weights on AMX tiles. Included after conv2d/amx_impl.h.
//
//   out[(tap, c), j] = sum over windows of image[window, (tap, c)] * weights[window, j]
//
//   for column strip j          (nc wide)
//     for row strip m           (mc rows: as many as have their partial sums in L2)
//       for block of windows    (kc of them)
//         pack dy, the weights  -> panels of 32 columns, in L2
//         for row block         (32 rows)
//           pack its part of the windows: step by step side by side, then transposed
//           for panel: tile product, and after the last windows the store

static_assert(kMostRows == kAmxDepth, "each step has windows of its own");

// Buffers of one task.
struct AmxWeightBuffers {
  float* staging;    // a block of sums
  BF16* lhs;         // a block of rows, packed
  BF16* rhs;         // dy of a block of windows, packed
  Windows* windows;  // of that block, step by step
  float* sums;       // partial sums, block by block; null unless there are several blocks
                     // of windows

  AmxWeightBuffers(const ConvProduct& product, const ConvBlocks& blocks,
                   Workspace& space) {
    staging = space.Take<float>(kBlockSize);
    lhs = space.Take<BF16>(kAmxRows * blocks.kc);
    rhs = space.Take<BF16>(blocks.kc * blocks.nc);
    windows = space.Take<Windows>(blocks.kc / kAmxDepth);
    const bool several = blocks.kc < product.rows();
    sums = several ? space.Take<float>(blocks.mc * blocks.nc) : nullptr;
  }
};

int64_t AmxWeightGradBytes(const ConvProduct& product, const ConvBlocks& blocks) {
  return BytesOf<AmxWeightBuffers>(product, blocks);
}

using WindowParts = RowParts<kAmxRows>;

TRACEA_INLINE void StoreHalvesUpTo(BF16* p, Half32 x, int64_t count) {
  if (count >= kAmxDepth) return StoreHalves(p, x);
  _mm512_mask_storeu_epi16(p, (__mmask32)((1u << count) - 1), (__m512i)x);
}

// One step of a row block, of `count` windows.
void PackWindowStep(const ConvProduct& product, const WindowParts& row, int64_t rows,
                    const Windows& windows, int64_t count, BF16* to) {
  alignas(64) BF16 lines[kAmxDepth * kAmxRows];
  if (rows < kAmxRows || count < kAmxDepth) memset(lines, 0, sizeof(lines));
  for (int64_t k = 0; k < row.count; ++k) {
    const RowPart& part = row.parts[k];
    for (int64_t i = 0; i < count; ++i) {
      BF16 room[kAmxRows];
      const BF16* from = FindPart(product, windows, i, part.place, part.count, room);
      StoreHalvesUpTo(lines + i * kAmxRows + part.at, LoadHalves(from, part.count),
                      part.count);
    }
  }
  for (int64_t j = 0; j < kAmxRows; j += 8) {
    TransposeEight(lines + j, kAmxRows, to + j * kAmxDepth);
  }
}

void StoreWeights(const ConvProduct& product, const float* sums, int64_t m, int64_t rows,
                  int64_t j, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i, sums += kAmxCols) {
    StorePair(product.out_type, product.out, (m + i) * product.out_pixel + j, Load(sums),
              Load(sums + kLanes), cols);
  }
}

void RunAmxWeightBlock(const ConvProduct& product, const Block& block,
                       const AmxWeightBuffers& buffers) {
  const int64_t steps = CeilDiv(block.kc, kAmxDepth);
  const auto windows_of = [&](int64_t s) {
    return Min(kAmxDepth, block.kc - s * kAmxDepth);
  };
  for (int64_t s = 0; s < steps; ++s) {
    LocateWindows(product, block.p0 + s * kAmxDepth, windows_of(s), buffers.windows + s);
  }
  const int64_t stride = product.weights_stride;
  const BF16* dy = (const BF16*)product.weights + block.p0 * stride + block.j0;
  PackAmxRhs(dy, stride, block.kc, block.cols, buffers.rhs);
  int64_t done = 0;  // blocks of sums
  for (int64_t m = block.i0; m < block.i1; m += kAmxRows) {
    const int64_t rows = Min(kAmxRows, block.i1 - m);
    const WindowParts row(product, m, rows, kAmxRows);
    for (int64_t s = 0; s < steps; ++s) {
      PackWindowStep(product, row, rows, buffers.windows[s], windows_of(s),
                     buffers.lhs + s * kAmxStepSize);
    }
    for (int64_t c = 0; c < block.cols; c += kAmxCols, ++done) {
      const int64_t cols = Min(kAmxCols, block.cols - c);
      float* sums = buffers.sums ? buffers.sums + done * kBlockSize : buffers.staging;
      AmxBlockProduct(steps, rows, cols, PackedLhs(buffers.lhs),
                      buffers.rhs + c / kAmxCols * steps * kAmxStepSize, sums,
                      !block.first, NoWork());
      if (block.last) StoreWeights(product, sums, m, rows, block.j0 + c, cols);
    }
  }
}

void RunAmxWeightGrad(const ConvProduct& product, const ConvBlocks& blocks,
                      const MatrixRange& range, float* memory) {
  Workspace space(memory);
  const AmxWeightBuffers buffers(product, blocks, space);
  const AmxScope scope;
  const int64_t mc = buffers.sums ? blocks.mc : range.m1 - range.m0;
  const BlockLoop loop{range, product.rows(), blocks.kc, blocks.nc, mc};
  loop.ForEach([&](const Block& block) { RunAmxWeightBlock(product, block, buffers); });
}
