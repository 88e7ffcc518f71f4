// Strips: lines of an image, copied with zeros on both sides, so that windows of lines of
// rows lie in it at equal distances, from one line to the next too. A part of
// conv2d/amx_impl.h.
//
//   line   what the windows of a line of rows see in a line of the image: its pixels
//          once, if these fill the steps of tiles, else window after window, filled up to
//          whole steps. After the windows on pixels come as many of no use as the
//          distances ask for; they go on into the next line.
//   plane  every y.step-th line: those that a tap shows to the lines of rows in turn

constexpr int64_t kStripSize = int64_t{1} << 17;  // elements
constexpr int64_t kFewestLines = 4;  // of rows in a strip: the next copies lines again
constexpr int64_t kFewestRows = 12;  // of a line
constexpr int64_t kMostUseless = 2;  // windows of no use for each row

struct StripShape {
  bool pixels;     // once
  int64_t row;     // elements from one window to the next
  int64_t across;  // windows of a line
  int64_t line;    // elements
  int64_t most;    // lines of rows, whichever taps they see
};

inline StripShape StripShapeOf(const ConvProduct& product) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t run = RunsFrom(product, 0).length;
  StripShape shape;
  shape.pixels = run % kAmxDepth == 0;
  shape.row = shape.pixels ? x.step * product.channels
                           : CeilDiv(run, kAmxDepth) * kAmxDepth;
  shape.across = x.rows + (shape.pixels ? (x.taps - 1) * x.tap_step / x.step : 0);
  shape.line = shape.across * shape.row;
  // Tiles are loaded whole, from up to 32 windows after the last one.
  const int64_t room = kStripSize - kMostRows * shape.row - shape.line;
  const int64_t plane = room / Max(y.step * shape.line, 1);
  shape.most = plane - (y.taps - 1) * y.tap_step / y.step;
  return shape;
}

// Whether a strip pays for products with so many panels of weights. The alternative
// gathers every window, which takes about the time of two panels; windows of no use take
// time in all of them, and windows one by one must serve several lines of rows. Rows of a
// tile must not lie multiples of a page apart, where all need the same few lines of L1.
inline bool PaysInStrips(const ConvProduct& product, const StripShape& shape,
                         int64_t panels) {
  const ConvAxis &y = product.y, &x = product.x;
  if (x.rows < kFewestRows || shape.most < Min(kFewestLines, y.rows)) return false;
  if (shape.row * (int64_t)sizeof(BF16) % 4096 == 0) return false;
  if (!shape.pixels) return RunsFrom(product, 0).per_line == 1 && y.taps >= 2 * y.step;
  return panels * (shape.across - x.rows) <= kMostUseless * x.rows;
}

// Elements [from, from + length) of a line of the image, whose elements count as zero
// outside of [0, width); 32 with those that follow, which are zero.
TRACEA_INLINE void StoreInside(const BF16* line, int64_t width, int64_t from,
                               int64_t length, BF16* to) {
  if (from >= 0 && from + length <= width) {
    return StoreHalves(to, LoadHalves(line + from, length));
  }
  StoreHalves(to, Half32{});
  const int64_t before = from < 0 ? -from : 0;
  const int64_t inside = Min(length, width - from) - before;
  if (inside <= 0) return;
  const __mmask32 mask = inside >= 32 ? ~0u : (1u << inside) - 1;
  const Half32 elements = LoadHalves(line + from + before, inside);
  _mm512_mask_storeu_epi16(to + before, mask, (__m512i)elements);
}

// Pixels of a line of the image, with zeros on both sides.
inline void CopyPixels(const ConvProduct& product, const StripShape& shape,
                       const BF16* line, BF16* to) {
  const ConvAxis& x = product.x;
  const int64_t channels = product.channels, pixels = shape.across * x.step;
  const int64_t begin = Min(Max(-x.offset, 0), pixels);
  const int64_t end = Max(Min(x.size - x.offset, pixels), begin);
  memset(to, 0, begin * channels * sizeof(BF16));
  memset(to + end * channels, 0, (pixels - end) * channels * sizeof(BF16));
  const BF16* from = line + (x.offset + begin) * product.pixel;
  to += begin * channels;
  if (product.pixel == channels) {
    memcpy(to, from, (end - begin) * channels * sizeof(BF16));
    return;
  }
  for (int64_t i = begin; i < end; ++i, from += product.pixel, to += channels) {
    memcpy(to, from, channels * sizeof(BF16));
  }
}

// Windows of a line of the image, one by one.
inline void CopyWindows(const ConvProduct& product, const StripShape& shape,
                        const BF16* line, BF16* to) {
  const ConvAxis& x = product.x;
  const int64_t run = RunsFrom(product, 0).length, width = x.size * product.pixel;
  for (int64_t i = 0; i < shape.across; ++i, to += shape.row) {
    const int64_t from = (i * x.step + x.offset) * product.pixel;
    for (int64_t o = 0; o < run; o += kAmxDepth) {
      StoreInside(line, width, from + o, Min(kAmxDepth, run - o), to + o);
    }
  }
}

// Planes of `depth` lines, of those lines of image n that begin with line iy.
inline void CopyStrip(const ConvProduct& product, const StripShape& shape, int64_t n,
                      int64_t iy, int64_t lines, int64_t depth, BF16* strip) {
  const int64_t width = product.x.size * product.pixel, step = product.y.step;
  const BF16* from = (const BF16*)product.image + (n * product.y.size + iy) * width;
  for (int64_t l = 0; l < lines; ++l, from += width) {
    BF16* to = strip + (l % step * depth + l / step) * shape.line;
    if (shape.pixels) {
      CopyPixels(product, shape, from, to);
    } else {
      CopyWindows(product, shape, from, to);
    }
  }
}
