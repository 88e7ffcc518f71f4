// Convolutions of every channel with a kernel of its own, vectorised over channels. A
// part of conv2d/widened_impl.h.
//
//   out[pixel, c] = sum over taps of image[pixel, tap, c] * weights[tap, c]

constexpr int kPixels = 4;  // neighbours in a line that share loads of the weights

// Taps [begin, end) whose entries lie in the image, for a window that begins at `at`.
struct TapRange {
  int64_t begin, end;
};

TRACEA_INLINE TapRange TapsInside(const ConvAxis& axis, int64_t at) {
  TapRange range{0, axis.taps};
  while (range.begin < range.end && at + range.begin * axis.tap_step < 0) ++range.begin;
  while (range.end > range.begin &&
         at + (range.end - 1) * axis.tap_step >= axis.size) {
    --range.end;
  }
  return range;
}

// kCount windows of a line, `step` pixels apart, that share their taps: sums[i][c] for
// channels [c, c + vectors). `first` is the element where tap (0, 0) of the first window
// lies, whether it exists or not.
template <typename T, int kCount>
TRACEA_INLINE void SumWindows(const ConvProduct& product, int64_t first, TapRange ty,
                              TapRange tx, const float* weights, int64_t nc,
                              int64_t channels, float* sums) {
  const ConvAxis &y = product.y, &x = product.x;
  const T* image = (const T*)product.image;
  const int64_t apart = x.step * product.pixel, next_tap = x.tap_step * product.pixel;
  const int64_t next_line = y.tap_step * x.size * product.pixel;
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t count = channels - c;
    Vec acc[kCount];
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) acc[i] = Vec{};
    for (int64_t t = ty.begin; t < ty.end; ++t) {
      const float* w = weights + (t * x.taps + tx.begin) * nc + c;
      for (int64_t s = tx.begin; s < tx.end; ++s, w += nc) {
        const T* from = image + (first + t * next_line + s * next_tap + c);
        const Vec b = Load(w);
        TRACEA_UNROLL
        for (int i = 0; i < kCount; ++i) acc[i] += LoadUpTo(from + i * apart, count) * b;
      }
    }
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) Store(sums + i * nc + c, acc[i]);
  }
}

// Weights of channels [j, j + cols) as f32, [taps][nc], zero beyond the last channel.
template <typename T>
void WidenWeights(const ConvProduct& product, int64_t j, int64_t cols, int64_t nc,
                  float* to) {
  ForEachTap(product, 0, product.depth(),
             [&](int64_t from, int64_t, int64_t at) {
               const T* weights = (const T*)product.weights + from + j;
               float* row = to + at / product.channels * nc;
               for (int64_t c = 0; c < cols; c += kLanes) {
                 Store(row + c, LoadUpTo(weights + c, cols - c));
               }
             });
}

// Buffers of one task.
struct DepthwiseBuffers {
  float* bias;
  float* sums;     // of some neighbours
  float* weights;  // of all taps, as f32

  DepthwiseBuffers(const ConvProduct& product, const ConvBlocks& blocks,
                   Workspace& space) {
    bias = space.Take<float>(blocks.nc);
    sums = space.Take<float>(kPixels * blocks.nc);
    weights = space.Take<float>(product.y.taps * product.x.taps * blocks.nc);
  }
};

int64_t DepthwiseBytes(const ConvProduct& product, const ConvBlocks& blocks) {
  return BytesOf<DepthwiseBuffers>(product, blocks);
}

template <typename T>
void RunDepthwiseAs(const ConvProduct& product, const ConvBlocks& blocks,
                    const MatrixRange& range, float* memory) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t nc = blocks.nc;
  Workspace space(memory);
  const DepthwiseBuffers buffers(product, blocks, space);
  float *sums = buffers.sums, *weights = buffers.weights;
  Windows windows;
  for (int64_t j = range.n0; j < range.n1; j += nc) {
    const int64_t cols = Min(nc, range.n1 - j);
    const float* bias = LoadConvBias(product, j, cols, buffers.bias);
    WidenWeights<T>(product, j, cols, nc, weights);
    for (int64_t m = range.m0; m < range.m1;) {
      // Windows of one line.
      const int64_t left = Min(range.m1 - m, x.rows - m % x.rows);
      int64_t count = Min(kPixels, left);
      LocateWindows(product, m, count, &windows);
      const TapRange ty = TapsInside(y, windows.y[0]);
      TapRange tx = TapsInside(x, windows.x[0]);
      if (count == kPixels) {
        const TapRange last = TapsInside(x, windows.x[kPixels - 1]);
        const bool same = tx.begin == 0 && tx.end == x.taps && last.begin == 0 &&
                          last.end == x.taps;
        if (!same) count = 1;
      } else {
        count = 1;
      }
      const int64_t first =
          (windows.image[0] + windows.y[0] * x.size + windows.x[0]) * product.pixel + j;
      if (count == kPixels) {
        SumWindows<T, kPixels>(product, first, ty, tx, weights, nc, cols, sums);
      } else {
        SumWindows<T, 1>(product, first, ty, tx, weights, nc, cols, sums);
      }
      FinishConv(product, ConvTile{sums, nc, windows.out, count, j, cols}, bias);
      m += count;
    }
  }
}

// sums[c] += image[window, c] * dy[window, c] over the windows of one line that have the
// tap. first: the element that the tap of window 0 would have; dy: of window 0.
template <typename T>
TRACEA_INLINE void AddLine(const ConvProduct& product, int64_t first, int64_t dy,
                           Interval windows, int64_t channels, float* sums) {
  const int64_t apart = product.x.step * product.pixel, next = product.weights_stride;
  const int64_t count = windows.end - windows.begin;
  const T* image = (const T*)product.image + (first + windows.begin * apart);
  const T* weights = (const T*)product.weights + (dy + windows.begin * next);
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t left = channels - c;
    Vec acc[4] = {};  // as many windows at once
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      TRACEA_UNROLL
      for (int v = 0; v < 4; ++v) {
        acc[v] += LoadUpTo(image + (i + v) * apart + c, left) *
                  LoadUpTo(weights + (i + v) * next + c, left);
      }
    }
    for (; i < count; ++i) {
      acc[0] += LoadUpTo(image + i * apart + c, left) *
                LoadUpTo(weights + i * next + c, left);
    }
    Store(sums + c, Load(sums + c) + ((acc[0] + acc[1]) + (acc[2] + acc[3])));
  }
}

// Buffers of one task.
struct DepthwiseWeightBuffers {
  float* sums;  // of a tap

  DepthwiseWeightBuffers(const ConvBlocks& blocks, Workspace& space)
      : sums(space.Take<float>(blocks.nc)) {}
};

int64_t DepthwiseWeightGradBytes(const ConvProduct&, const ConvBlocks& blocks) {
  return BytesOf<DepthwiseWeightBuffers>(blocks);
}

// The gradient of the weights: out[tap, c] = sum over windows of image[window, tap, c] *
// weights[window, c], where `weights` is dy. Rows of the range are taps. Lines of windows
// are summed one by one.
template <typename T>
void RunDepthwiseWeightGradAs(const ConvProduct& product, const ConvBlocks& blocks,
                              const MatrixRange& range, float* memory) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t nc = blocks.nc;
  Workspace space(memory);
  float* const sums = DepthwiseWeightBuffers(blocks, space).sums;
  ConvAxis one_tap = x;
  one_tap.taps = 1;
  for (int64_t j = range.n0; j < range.n1; j += nc) {
    const int64_t cols = Min(nc, range.n1 - j);
    for (int64_t m = range.m0; m < range.m1; ++m) {
      const int64_t tap_y = m / x.taps * y.tap_step + y.offset;
      const int64_t tap_x = m % x.taps * x.tap_step + x.offset;
      one_tap.offset = tap_x;
      const Interval inside = InteriorOf(one_tap);
      memset(sums, 0, nc * sizeof(float));
      for (int64_t line = 0; line < product.batch * y.rows; ++line) {
        const int64_t iy = line % y.rows * y.step + tap_y;
        if (iy < 0 || iy >= y.size || inside.begin >= inside.end) continue;
        const int64_t above = (line / y.rows * y.size + iy) * x.size + tap_x;
        AddLine<T>(product, above * product.pixel + j,
                   line * x.rows * product.weights_stride + j, inside, cols, sums);
      }
      const int64_t out = m * product.out_pixel;
      FinishConv(product, ConvTile{sums, nc, &out, 1, j, cols}, nullptr);
    }
  }
}

void RunDepthwiseWeightGrad(const ConvProduct& product, const ConvBlocks& blocks,
                            const MatrixRange& range, float* workspace) {
  switch (product.in_type) {
    case DType::kF32:
      return RunDepthwiseWeightGradAs<F32>(product, blocks, range, workspace);
    case DType::kBF16:
      return RunDepthwiseWeightGradAs<BF16>(product, blocks, range, workspace);
    case DType::kF16:
      return RunDepthwiseWeightGradAs<F16>(product, blocks, range, workspace);
  }
}

void RunDepthwise(const ConvProduct& product, const ConvBlocks& blocks,
                  const MatrixRange& range, float* workspace) {
  switch (product.in_type) {
    case DType::kF32:
      return RunDepthwiseAs<F32>(product, blocks, range, workspace);
    case DType::kBF16:
      return RunDepthwiseAs<BF16>(product, blocks, range, workspace);
    case DType::kF16:
      return RunDepthwiseAs<F16>(product, blocks, range, workspace);
  }
}
