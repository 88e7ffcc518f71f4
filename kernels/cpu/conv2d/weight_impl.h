// The gradient of a convolution's weights. A part of conv2d/vectors_impl.h.
//
//   out[(tap, c), j] = sum over windows of image[window, (tap, c)] * weights[window, j]
//
// `weights` is dy, stored by rows as the product wants it; the lhs is gathered windows,
// which are its columns and packed so.

// Rows of a word of windows from window i on, of which `depth` are left. Lanes beyond
// `rows.count` have any values.
template <typename T>
TRACEA_INLINE Vec LoadWindowWords(const ConvProduct& product, const Windows& windows,
                                  int64_t i, int64_t depth, const RowPart& rows,
                                  const T* end) {
  Part parts[kWordDepth];
  TRACEA_UNROLL
  for (int d = 0; d < kWordDepth; ++d) {
    parts[d] = Part{};
    if (d >= depth) continue;
    T room[kLanes];
    const T* part = FindPart(product, windows, i + d, rows.place, rows.count, room);
    const bool reads_on = part != room && part + kLanes <= end;
    parts[d] = LoadPart(part, reads_on ? kLanes : rows.count);
  }
  return JoinParts(parts);
}

static_assert(kMostRows % kWordDepth == 0, "words must not span blocks of windows");

// Rows [m, m + rows) of the lhs, `depth` windows deep, as the micro-kernels read them.
// Vectors are stored whole: what they leave behind a part, the next part replaces, and
// behind the last of a step the next step does. `packed` has room behind the last step.
template <typename T>
void PackWindows(const ConvProduct& product, const Windows* windows, int64_t m,
                 int64_t rows, int64_t depth, float* packed) {
  const RowParts<kTileM> found(product, m, rows, kLanes);
  const T* end = EndOfImage<T>(product);
  for (int64_t at = 0; at < depth; at += kWordDepth, packed += kLhsStep) {
    const Windows& near = windows[at / kMostRows];
    for (int64_t i = 0; i < found.count; ++i) {
      const Vec words = LoadWindowWords<T>(product, near, at % kMostRows, depth - at,
                                           found.parts[i], end);
      Store(packed + found.parts[i].at, words);
    }
  }
}

// Buffers of one task.
struct WeightWorkspace {
  ConvBuffers packed;
  Windows* windows;  // of a block of depth

  WeightWorkspace(const ConvProduct& product, const ConvBlocks& blocks, Workspace& space)
      : packed(blocks, BuffersSums(product, blocks, product.rows()), space) {
    windows = space.Take<Windows>(CeilDiv(blocks.kc, kMostRows));
  }
};

int64_t WeightGradBytes(const ConvProduct& product, const ConvBlocks& blocks) {
  return BytesOf<WeightWorkspace>(product, blocks);
}

// The windows and dy of a block of depth, as RunWeightBlock reads them.
template <typename T>
void PrepareWindows(const ConvProduct& product, const Block& block,
                    const WeightWorkspace& space) {
  for (int64_t q = 0; q < block.kc; q += kMostRows) {
    LocateWindows(product, block.p0 + q, Min(kMostRows, block.kc - q),
                  &space.windows[q / kMostRows]);
  }
  if (block.kc == 0) return;
  const int64_t stride = product.weights_stride;
  PackRhs((const T*)product.weights + block.p0 * stride + block.j0, stride, block.kc,
          block.cols, space.packed.rhs);
}

template <typename T>
void RunWeightBlock(const ConvProduct& product, const Block& block,
                    const ConvSums& partial, const WeightWorkspace& space) {
  int64_t row[kTileM], out[kTileM];
  int64_t row_blocks = CeilDiv(block.i1 - block.i0, kTileM);
  for (int64_t m = block.i0; m < block.i1; --row_blocks) {
    const int64_t rows = CeilDiv(block.i1 - m, row_blocks);
    for (int64_t i = 0; i < rows; ++i) {
      row[i] = m + i;
      out[i] = (m + i) * product.out_pixel;
    }
    PackWindows<T>(product, space.windows, m, rows, block.kc, space.packed.lhs);
    RunPackedRows(product, block, partial, ConvRows{row, out, rows}, WordsIn(block.kc),
                  space.packed.lhs, space.packed.rhs, nullptr, kByColumn);
    m += rows;
  }
}

template <typename T>
void RunWeightGradAs(const ConvProduct& product, const ConvBlocks& blocks,
                     const MatrixRange& range, float* memory) {
  Workspace counted(memory);
  const WeightWorkspace space(product, blocks, counted);
  const int64_t mc = space.packed.sums ? blocks.mc : range.m1 - range.m0;
  const BlockLoop loop{range, product.rows(), blocks.kc, blocks.nc, mc};
  loop.ForEach([&](const Block& block) {
    PrepareWindows<T>(product, block, space);
    RunWeightBlock<T>(product, block, SumsOf(product, space.packed, block, blocks.nc),
                      space);
  });
}
