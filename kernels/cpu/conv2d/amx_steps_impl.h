// Steps of a convolution on AMX tiles, and what is packed step by step. A part of
// conv2d/amx_impl.h.
//
// A step is 32 elements of a run of a window; the last one of a run is filled up with
// zeros, in the windows and in the weights. So no step crosses the end of a run, and a
// row of a step is one load from the image.
//
//   CutSteps     where the steps of a block of depth begin, in the image and the weights
//   StepsOf      those of them whose lines of taps some lines of the images see
//   PackSteps    their weights, panel by panel, as AmxProduct reads them
//   GatherSteps  a window of them, into its row of the packed lhs

static_assert(kConvDepthUnit == kAmxDepth, "blocks of depth must be whole steps");
constexpr int kMostSteps = kConvMostDepth / kAmxDepth;  // of a block of depth

// The steps of all of a row's depth, in which every run is filled up to whole steps.
int64_t AllSteps(const ConvProduct& product) {
  const Runs runs = RunsFrom(product, 0);
  return product.y.taps * runs.per_line * CeilDiv(runs.length, kAmxDepth);
}

// The steps of a block of depth.
struct Steps {
  int64_t count;
  int64_t ty[kMostSteps];       //
  int64_t from[kMostSteps];     // elements of the line of taps before the step
  int64_t strip[kMostSteps];    // the same in a strip, without other groups' channels
  int64_t p[kMostSteps];        // the same of the whole row
  int64_t offset[kMostSteps];   // of the image, after the window's beginning
  int64_t length[kMostSteps];   // elements
};

void CutSteps(const ConvProduct& product, int64_t first, int64_t count, Steps* steps) {
  const Runs runs = RunsFrom(product, 0);
  const int64_t next_tap = product.x.tap_step * product.pixel;
  const int64_t next_line = product.y.tap_step * product.x.size * product.pixel;
  const int64_t per_run = CeilDiv(runs.length, kAmxDepth);
  steps->count = count;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t run = (first + s) / per_run, o = (first + s) % per_run * kAmxDepth;
    const int64_t ty = run / runs.per_line, tx = run % runs.per_line;
    steps->ty[s] = ty;
    steps->from[s] = tx * next_tap + o;
    steps->strip[s] = tx * product.x.tap_step * product.channels + o;
    steps->p[s] = run * runs.length + o;
    steps->offset[s] = ty * next_line + steps->from[s];
    steps->length[s] = Min(kAmxDepth, runs.length - o);
  }
}

// The steps of the lines of taps that some lines of the images see.
struct SeenSteps {
  int64_t first, count;
  int64_t last;  // largest offset
};

SeenSteps StepsOf(const Steps& steps, const Interval& taps) {
  SeenSteps seen{0, 0, 0};
  for (int64_t s = 0; s < steps.count; ++s) {
    if (!taps.Has(steps.ty[s])) continue;
    if (seen.count++ == 0) seen.first = s;
    seen.last = Max(seen.last, steps.offset[s]);
  }
  return seen;
}

// One step of weights stored by columns, of which a step may cross several taps.
inline void PackTransposedStep(const ConvProduct& product, int64_t p, int64_t length,
                               int64_t j, int64_t cols, BF16* to) {
  const BF16* weights = (const BF16*)product.weights + j * product.weights_stride;
  if (p % product.channels + length <= product.channels) {
    ForEachTap(product, p, length, [&](int64_t from, int64_t count, int64_t) {
      for (int64_t half = 0; half < kAmxCols; half += kLanes) {
        TransposePairs(weights + from + half * product.weights_stride,
                       product.weights_stride, cols - half, count,
                       to + half / kLanes * (kAmxTile / 2));
      }
    });
    return;
  }
  BF16 lines[kAmxDepth * kAmxCols] = {};
  ForEachTap(product, p, length, [&](int64_t from, int64_t count, int64_t at) {
    for (int64_t i = 0; i < Min(cols, kAmxCols); ++i) {
      const BF16* column = weights + from + i * product.weights_stride;
      for (int64_t c = 0; c < count; ++c) lines[(at + c) * kAmxCols + i] = column[c];
    }
  });
  PackAmxRhsStep(lines, kAmxCols, to);
}

// The steps' rows of columns [j, j + cols) of the weights, as AmxProduct reads them.
void PackSteps(const ConvProduct& product, const Steps& steps, int64_t j, int64_t cols,
               BF16* packed) {
  const BF16* weights = (const BF16*)product.weights;
  const int64_t stride = product.weights_stride;
  for (int64_t s = 0; s < steps.count; ++s) {
    BF16* to = packed + s * kAmxStepSize;
    for (int64_t c = 0; c < cols; c += kAmxCols, to += steps.count * kAmxStepSize) {
      const int64_t p = steps.p[s], length = steps.length[s], left = cols - c;
      if (product.trans_weights) {
        PackTransposedStep(product, p, length, j + c, left, to);
      } else if (length == kAmxDepth && left >= kAmxCols) {
        PackAmxRhsStep(weights + p * stride + j + c, stride, to);
      } else {
        PackAmxRhsRest(weights + p * stride + j + c, stride, length, left, to);
      }
    }
  }
}

// Window i, of which these steps are in the image but for its sides, into its row of the
// packed lhs.
TRACEA_INLINE void GatherSteps(const ConvProduct& product, const Steps& steps,
                               const SeenSteps& seen, const Windows& windows, int64_t i,
                               BF16* to) {
  const ConvAxis& x = product.x;
  const int64_t width = x.size * product.pixel;
  const BF16* image = (const BF16*)product.image + windows.image[i] * product.pixel;
  const int64_t begin = windows.x[i] * product.pixel;
  const int64_t end = seen.first + seen.count;
  if (IsInside(x, windows.x[i])) {
    const int64_t window = windows.y[i] * width + begin;
    for (int64_t s = seen.first; s < end; ++s, to += kAmxStepSize) {
      StoreHalves(to, LoadHalves(image + (window + steps.offset[s]), steps.length[s]));
    }
    return;
  }
  for (int64_t s = seen.first; s < end; ++s, to += kAmxStepSize) {
    const int64_t iy = windows.y[i] + steps.ty[s] * product.y.tap_step;
    StoreInside(image + iy * width, width, begin + steps.from[s], steps.length[s], to);
  }
}
