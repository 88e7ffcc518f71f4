// The gradient of a convolution's weights. A part of conv2d/vectors_impl.h.
//
//   out[(tap, c), j] = sum over windows of image[window, (tap, c)] * weights[window, j]
//
// `weights` is dy, stored by rows as the product wants it; the lhs is gathered windows,
// which are its columns and packed so.

// `count` <= kLanes elements, as FindPart has them, of a word of windows from window i on,
// of which `depth` are left.
template <typename T>
TRACEA_INLINE Vec LoadWindowWords(const ConvProduct& product, const Windows& windows,
                                  int64_t i, int64_t depth, int64_t ty, int64_t tx,
                                  int64_t o, int64_t count) {
  Part parts[kWordDepth];
  TRACEA_UNROLL
  for (int d = 0; d < kWordDepth; ++d) {
    parts[d] = Part{};
    if (d >= depth) continue;
    T room[kLanes];
    const T* part = FindPart(product, windows, i + d, ty, tx, o, count, room);
    parts[d] = LoadPart(part, count);
  }
  return JoinParts(parts);
}

static_assert(kMostRows % kWordDepth == 0, "words must not span blocks of windows");

// Rows [m, m + rows) of the lhs, `depth` windows deep, as the micro-kernels read them.
template <typename T>
void PackWindows(const ConvProduct& product, const Windows* windows, int64_t m,
                 int64_t rows, int64_t depth, float* packed) {
  const auto pack = [&](int64_t ty, int64_t tx, int64_t o, int64_t count, int64_t i) {
    // What is stored beyond them comes later, or is not read.
    const int64_t stored = i + kLanes <= kLhsStep ? kLanes : count;
    F32* to = (F32*)packed + i;
    for (int64_t at = 0; at < depth; at += kWordDepth, to += kLhsStep) {
      const Vec words = LoadWindowWords<T>(product, windows[at / kMostRows], at % kMostRows,
                                           depth - at, ty, tx, o, count);
      StoreUpTo(to, words, stored);
    }
  };
  ForEachPart(product, m, rows, kLanes, pack);
}

template <typename T>
void RunWeightBlock(const ConvProduct& product, const ConvBlock& block,
                    const ConvSums& partial, const ConvWorkspace& space,
                    const Windows* windows) {
  int64_t row[kTileM], out[kTileM];
  int64_t row_blocks = CeilDiv(block.m1 - block.m0, kTileM);
  for (int64_t m = block.m0; m < block.m1; --row_blocks) {
    const int64_t rows = CeilDiv(block.m1 - m, row_blocks);
    for (int64_t i = 0; i < rows; ++i) {
      row[i] = m + i;
      out[i] = (m + i) * product.out_pixel;
    }
    PackWindows<T>(product, windows, m, rows, block.depth, space.lhs);
    RunPackedRows(product, block, partial, ConvRows{row, out, rows},
                  WordsIn(block.depth), space.lhs, space.rhs, nullptr, kByColumn);
    m += rows;
  }
}

static_assert(sizeof(Windows) <= kMostRows * kLineRows * sizeof(float),
              "the windows of a block must fit where its lines would be");

template <typename T>
void RunWeightGradAs(const ConvProduct& product, const ConvBlocks& blocks,
                     const ConvRange& range, float* memory) {
  const ConvWorkspace space(blocks, memory);
  Windows* windows = (Windows*)space.lines;
  const int64_t all = product.rows();
  const bool in_place = product.out_type == DType::kF32;
  const bool buffered = !in_place && blocks.kc < all;
  const int64_t mc = buffered ? blocks.mc : range.m1 - range.m0;
  for (int64_t j = range.n0; j < range.n1; j += blocks.nc) {
    const int64_t cols = Min(blocks.nc, range.n1 - j);
    for (int64_t m = range.m0; m < range.m1; m += mc) {
      const int64_t m1 = Min(m + mc, range.m1);
      ConvSums partial{nullptr, 0, true};
      if (in_place) partial = {(float*)product.out, product.out_pixel, false};
      if (buffered) partial = {space.sums - m * blocks.nc - j, blocks.nc, true};
      int64_t p = 0;
      do {  // once if there are no windows: zeros
        const int64_t depth = Min(blocks.kc, all - p);
        for (int64_t q = 0; q < depth; q += kMostRows) {
          LocateWindows(product, p + q, Min(kMostRows, depth - q),
                        &windows[q / kMostRows]);
        }
        if (depth > 0) {
          PackRhs((const T*)product.weights + p * product.weights_stride + j,
                  product.weights_stride, depth, cols, space.rhs);
        }
        const ConvBlock block{m, m1, j, cols, p, depth, p == 0, p + depth == all};
        RunWeightBlock<T>(product, block, partial, space, windows);
        p += depth;
      } while (p < all);
    }
  }
}
