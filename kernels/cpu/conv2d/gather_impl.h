// Rows of the implicit matrix that a convolution multiplies, gathered from the image. A
// part of conv2d/vectors_impl.h.

// Sends a row's next `depth` elements to the sink, in pieces, ascending: those in the
// image by sink.Copy(at, from, count), those outside by sink.Zero(at, count).
template <typename T, typename Sink>
TRACEA_INLINE void GatherRow(const ConvProduct& product, const Runs& runs,
                             const Windows& windows, int64_t i, int64_t depth,
                             const Sink& sink) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t width = x.size * product.pixel;
  const T* image = (const T*)product.image + windows.image[i] * product.pixel;
  const int64_t next_line = y.tap_step * width, next_tap = x.tap_step * product.pixel;
  int64_t tx = runs.tx, o = runs.o, count = Min(runs.length - o, depth);
  if (IsInside(y, windows.y[i]) && IsInside(x, windows.x[i])) {
    const T* line = image + windows.y[i] * width + windows.x[i] * product.pixel +
                    runs.ty * next_line;
    const T* from = line + tx * next_tap + o;
    for (int64_t at = 0;;) {
      sink.Copy(at, from, count);
      at += count;
      if (at >= depth) return;
      count = Min(runs.length, depth - at);
      from += next_tap - o;
      o = 0;
      if (++tx < runs.per_line) continue;
      tx = 0;
      line += next_line;
      from = line;
    }
  }
  int64_t iy = windows.y[i] + runs.ty * y.tap_step;
  for (int64_t at = 0; at < depth; at += count, o = 0) {
    count = Min(runs.length - o, depth - at);
    if ((uint64_t)iy >= (uint64_t)y.size) {
      sink.Zero(at, count);
    } else {
      const int64_t from = (windows.x[i] + tx * x.tap_step) * product.pixel + o;
      const int64_t before = Min(from < 0 ? -from : 0, count);
      const int64_t end = Min(count, width - from);
      const int64_t inside = end > before ? end - before : 0;
      if (before > 0) sink.Zero(at, before);
      if (inside > 0) sink.Copy(at + before, image + iy * width + from + before, inside);
      const int64_t rest = count - before - inside;
      if (rest > 0) sink.Zero(at + count - rest, rest);
    }
    if (++tx < runs.per_line) continue;
    tx = 0;
    iy += y.tap_step;
  }
}

// Straight into chunks of packed lhs; all pieces must be multiples of kChunkDepth.
template <typename T>
struct ChunkSink {
  float* row;
  int64_t step;  // from one chunk to the next

  TRACEA_INLINE void Copy(int64_t at, const T* from, int64_t count) const {
    float* to = row + at / kChunkDepth * step;
    for (int64_t c = 0; c < count; c += kChunkDepth, to += step) {
      TRACEA_UNROLL
      for (int v = 0; v < kChunk; v += kLanes) {
        Store(to + v, LoadWords(from + c + v * kWordDepth));
      }
    }
  }
  TRACEA_INLINE void Zero(int64_t at, int64_t count) const {
    float* to = row + at / kChunkDepth * step;
    for (int64_t c = 0; c < count; c += kChunkDepth, to += step) {
      TRACEA_UNROLL
      for (int v = 0; v < kChunk; v += kLanes) Store(to + v, Vec{});
    }
  }
};

TRACEA_INLINE void CopyRaw(const F32* from, F32* to) {
  *(VecAny*)to = *(const VecAny*)from;
}
TRACEA_INLINE void CopyRaw(const BF16* from, BF16* to) {
  *(HalfAny*)to = *(const HalfAny*)from;
}
TRACEA_INLINE void CopyRaw(const F16* from, F16* to) {
  *(HalfAny*)to = *(const HalfAny*)from;
}
TRACEA_INLINE void ZeroRaw(F32* to) { *(VecAny*)to = Vec{}; }
TRACEA_INLINE void ZeroRaw(BF16* to) { *(HalfAny*)to = Half{}; }
TRACEA_INLINE void ZeroRaw(F16* to) { *(HalfAny*)to = Half{}; }

// Into memory, as it is. Up to a vector beyond each piece is overwritten, by the next
// piece again: the memory must be so much longer than the row.
template <typename T>
struct LineSink {
  T* row;
  const T* end;  // of the image: no vector is read beyond

  TRACEA_INLINE void Copy(int64_t at, const T* from, int64_t count) const {
    T* to = row + at;
    for (; count > 0 && from + kLanes <= end; count -= kLanes) {
      CopyRaw(from, to);
      from += kLanes;
      to += kLanes;
    }
    for (int64_t c = 0; c < count; ++c) to[c] = from[c];
  }
  TRACEA_INLINE void Zero(int64_t at, int64_t count) const {
    for (int64_t c = 0; c < count; c += kLanes) ZeroRaw(row + at + c);
  }
};

template <typename T>
const T* EndOfImage(const ConvProduct& product) {
  // From the group's first channel: the last pixel's channels of this group.
  const int64_t pixels = product.batch * product.y.size * product.x.size;
  const int64_t size = pixels > 0 ? (pixels - 1) * product.pixel + product.channels : 0;
  return (const T*)product.image + size;
}

// Room for a block of rows as they are, of at most kTileM.
template <typename T>
struct Lines {
  T* data;
  int64_t stride;
};

// rows x depth of the implicit lhs, packed as the micro-kernels read it.
template <typename T>
void PackWindows(const ConvProduct& product, const Windows& windows, int64_t rows,
                 int64_t p, int64_t depth, const Lines<T>& lines, float* packed) {
  if (depth == 0) return;
  const Runs runs = RunsFrom(product, p);
  if (product.channels % kChunkDepth == 0 && p % kChunkDepth == 0) {
    for (int64_t i = 0; i < rows; ++i) {
      const ChunkSink<T> sink{packed + i * kChunk, rows * kChunk};
      GatherRow<T>(product, runs, windows, i, depth, sink);
    }
    return;
  }
  const T* end = EndOfImage<T>(product);
  for (int64_t i = 0; i < rows; ++i) {
    const LineSink<T> sink{lines.data + i * lines.stride, end};
    GatherRow<T>(product, runs, windows, i, depth, sink);
  }
  PackLhs(lines.data, lines.stride, rows, depth, packed);
}

// One tap's part of transposed weights, element (c, j) at weights[j * stride + c], to
// rows of panels that are `words` deep. Zeros fill the last panel.
template <typename T>
void PackTapTransposed(const T* weights, int64_t stride, int64_t channels, int64_t cols,
                       int64_t words, float* packed) {
  for (int64_t j = 0; j < CeilDiv(cols, kTileN) * kTileN; j += kLanes) {
    float* to = packed + (j / kTileN) * words * kTileN + j % kTileN;
    for (int64_t c = 0; c < WordsIn(channels); c += kLanes) {
      Vec x[kLanes];
      const int64_t at = c * kWordDepth;
      LoadTransposed(weights + j * stride + at, stride, cols - j, channels - at, x);
      const int64_t count = Min(kLanes, WordsIn(channels) - c);
      for (int64_t r = 0; r < count; ++r) Store(to + (c + r) * kTileN, x[r]);
    }
  }
}

// depth x cols of the weights, packed as the micro-kernels read them. Stored by rows they
// are one matrix, whose taps are neighbours; transposed ones need whole words in each tap.
template <typename T>
void PackWeights(const ConvProduct& product, int64_t p, int64_t depth, int64_t j,
                 int64_t cols, float* packed) {
  const T* weights = (const T*)product.weights;
  const int64_t stride = product.weights_stride;
  if (!product.trans_weights) {
    return PackRhs(weights + p * stride + j, stride, depth, cols, packed);
  }
  ForEachTap(product, p, depth, [&](int64_t from, int64_t count, int64_t at) {
    PackTapTransposed(weights + from + j * stride, stride, count, cols, WordsIn(depth),
                      packed + WordsIn(at) * kTileN);
  });
}
