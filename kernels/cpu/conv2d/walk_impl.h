// Rows and depth of the implicit matrix that a convolution multiplies. A part of
// conv2d/vectors_impl.h and conv2d/amx_impl.h.
//
// A row is what one window of the kernel sees, in the order (tap y, tap x, channel).
// Taps that are neighbours in the image are neighbours in the row too, so a row is a few
// runs of contiguous memory: one for each tap, or one for each line of taps.

constexpr int kMostRows = 32;  // of a block, for any instruction set

// Where the windows of some rows begin, and where their results go.
struct Windows {
  int64_t image[kMostRows];  // pixels before this image
  int64_t y[kMostRows], x[kMostRows];
  int64_t row[kMostRows];  // of the product
  int64_t out[kMostRows];  // elements
};

// Where the result of row (n, oy, ox) goes, in elements.
TRACEA_INLINE int64_t OutOf(const ConvProduct& product, int64_t n, int64_t oy,
                            int64_t ox) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t out_y = n * y.out_size + y.out_first + oy * y.out_step;
  return (out_y * x.out_size + x.out_first + ox * x.out_step) * product.out_pixel;
}

// Row m = (n, oy, ox) as window i.
TRACEA_INLINE void PlaceWindow(const ConvProduct& product, int64_t n, int64_t oy,
                               int64_t ox, int64_t m, int64_t i, Windows* to) {
  const ConvAxis &y = product.y, &x = product.x;
  to->image[i] = n * y.size * x.size;
  to->y[i] = oy * y.step + y.offset;
  to->x[i] = ox * x.step + x.offset;
  to->row[i] = m;
  to->out[i] = OutOf(product, n, oy, ox);
}

inline void LocateWindows(const ConvProduct& product, int64_t m, int64_t rows,
                          Windows* to) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t line = m / x.rows;
  int64_t ox = m % x.rows, oy = line % y.rows, n = line / y.rows;
  for (int64_t i = 0; i < rows; ++i) {
    PlaceWindow(product, n, oy, ox, m + i, i, to);
    if (++ox < x.rows) continue;
    ox = 0;
    if (++oy < y.rows) continue;
    oy = 0;
    ++n;
  }
}

// How rows are cut into runs, and where in a row a block of depth begins.
struct Runs {
  int64_t length;    // of a run, in elements
  int64_t per_line;  // runs for each tap y
  int64_t ty, tx;    // the first run
  int64_t o;         // elements of it before the block
};

inline Runs RunsFrom(const ConvProduct& product, int64_t p) {
  const int64_t taps = product.x.taps;
  Runs runs{product.channels, taps, 0, 0, 0};
  if (product.merges_taps()) runs = {taps * product.channels, 1, 0, 0, 0};
  if (product.depth() == 0) return runs;
  const int64_t run = p / runs.length;
  runs.o = p % runs.length;
  runs.ty = run / runs.per_line;
  runs.tx = run % runs.per_line;
  return runs;
}

// Calls visit(ty, tx, o, count, at) for each part, of at most `most` elements, of depth
// [p, p + depth) that lies in one run: from element o of run (ty, tx) on, and `at` after p.
template <typename Visit>
TRACEA_INLINE void ForEachPart(const ConvProduct& product, int64_t p, int64_t depth,
                               int64_t most, const Visit& visit) {
  Runs runs = RunsFrom(product, p);
  for (int64_t at = 0; at < depth;) {
    const int64_t count = Min(Min(runs.length - runs.o, depth - at), most);
    visit(runs.ty, runs.tx, runs.o, count, at);
    at += count;
    runs.o += count;
    if (runs.o < runs.length) continue;
    runs.o = 0;
    if (++runs.tx < runs.per_line) continue;
    runs.tx = 0;
    ++runs.ty;
  }
}

// Where a part of a run begins, from the first element of its window.
struct PartPlace {
  int64_t down;   // lines of the image
  int64_t along;  // elements of a line
};

// That of element o of run (ty, tx).
TRACEA_INLINE PartPlace PlaceOf(const ConvProduct& product, int64_t ty, int64_t tx,
                                int64_t o) {
  return {ty * product.y.tap_step, tx * product.x.tap_step * product.pixel + o};
}

// Some of the rows of a block of a gradient of weights: `count` of them, from row `at` of
// the block on. They are neighbours in every window.
struct RowPart {
  PartPlace place;
  int64_t count, at;
};

// Rows [m, m + rows) of that product, of which there are at most kRows, in parts of at
// most `most`.
template <int kRows>
struct RowParts {
  RowPart parts[kRows];
  int64_t count = 0;

  RowParts(const ConvProduct& product, int64_t m, int64_t rows, int64_t most) {
    ForEachPart(product, m, rows, most,
                [&](int64_t ty, int64_t tx, int64_t o, int64_t length, int64_t at) {
                  parts[count++] = {PlaceOf(product, ty, tx, o), length, at};
                });
  }
};

// `count` elements of window i from a place on: where they lie, or copied to `room`, with
// zeros for those outside of the image.
template <typename T>
TRACEA_INLINE const T* FindPart(const ConvProduct& product, const Windows& windows,
                                int64_t i, const PartPlace& place, int64_t count,
                                T* room) {
  const ConvAxis &y = product.y, &x = product.x;
  const int64_t iy = windows.y[i] + place.down;
  const bool seen = (uint64_t)iy < (uint64_t)y.size;
  const int64_t width = x.size * product.pixel;
  const int64_t from = windows.x[i] * product.pixel + place.along;
  const int64_t line = (windows.image[i] + iy * x.size) * product.pixel;
  const T* image = (const T*)product.image;
  if (seen && from >= 0 && from + count <= width) return image + (line + from);
  for (int64_t c = 0; c < count; ++c) {
    const bool inside = seen && (uint64_t)(from + c) < (uint64_t)width;
    room[c] = inside ? image[line + from + c] : T{};
  }
  return room;
}

// Whether all of a window lies in the image.
TRACEA_INLINE bool IsInside(const ConvAxis& axis, int64_t at) {
  return at >= 0 && at + (axis.taps - 1) * axis.tap_step < axis.size;
}

// Calls visit(weights of the piece, its channels, its depth before) for each tap's part
// of depth [p, p + depth).
template <typename Visit>
TRACEA_INLINE void ForEachTap(const ConvProduct& product, int64_t p, int64_t depth,
                              const Visit& visit) {
  const ConvAxis &y = product.y, &x = product.x;
  int64_t tap = p / product.channels, c = p % product.channels;
  for (int64_t at = 0; at < depth; ++tap, c = 0) {
    const int64_t count = Min(product.channels - c, depth - at);
    const int64_t ty = y.first_tap + tap / x.taps * y.next_tap;
    const int64_t tx = x.first_tap + tap % x.taps * x.next_tap;
    const int64_t from = (ty * product.kernel_width + tx) * product.tap_size +
                         c * (product.trans_weights ? 1 : product.weights_stride);
    visit(from, count, at);
    at += count;
  }
}

// Half-open part of an axis.
struct Interval {
  int64_t begin, end;

  TRACEA_INLINE bool Has(int64_t i) const { return i >= begin && i < end; }
};

// The rows of an axis whose windows lie in the image.
inline Interval InteriorOf(const ConvAxis& axis) {
  const int64_t last = axis.size - 1 - (axis.taps - 1) * axis.tap_step - axis.offset;
  const int64_t begin = axis.offset < 0 ? CeilDiv(-axis.offset, axis.step) : 0;
  const int64_t end = last < 0 ? 0 : Min(last / axis.step + 1, axis.rows);
  return {begin, begin < end ? end : begin};
}

// The taps of an axis that a row's window has in the image; none if they end before they
// begin.
inline Interval TapsSeen(const ConvAxis& axis, int64_t row) {
  const int64_t at = row * axis.step + axis.offset;
  const int64_t before = at < 0 ? CeilDiv(-at, axis.tap_step) : 0;
  const int64_t end = at < axis.size ? CeilDiv(axis.size - at, axis.tap_step) : 0;
  return {Min(before, axis.taps), Min(end, axis.taps)};
}

// The first row that sees others, after a row that sees these taps.
inline int64_t FirstSeeingOthers(const ConvAxis& axis, const Interval& taps) {
  int64_t at = axis.rows * axis.step + axis.offset;  // of its window
  if (taps.begin > 0) at = Min(at, -(taps.begin - 1) * axis.tap_step);
  if (taps.end > 0) at = Min(at, axis.size - (taps.end - 1) * axis.tap_step);
  return Min(CeilDiv(at - axis.offset, axis.step), axis.rows);
}

// Calls visit(rows of the axis, the taps that all of these see) for each longest part.
template <typename Visit>
TRACEA_INLINE void ForEachTapsSeen(const ConvAxis& axis, const Visit& visit) {
  for (int64_t begin = 0, end; begin < axis.rows; begin = end) {
    const Interval seen = TapsSeen(axis, begin);
    end = FirstSeeingOthers(axis, seen);
    visit(Interval{begin, end}, seen.begin < seen.end ? seen : Interval{0, 0});
  }
}

// Part of both axes: of their rows, or of their taps.
struct Region {
  Interval y, x;
};

// Cuts those of rows [m0, m1) of a product that are in a region of each image into blocks
// of at most `tile`, which are passed on as
//   line(m, n, oy, ox, rows)  neighbours in a line of the region `whole`
//   gather(windows, rows)     any others, not always neighbours
// Blocks of a line are as equal as possible, or as large.
template <typename Line, typename Gather>
TRACEA_INLINE void WalkRows(const ConvProduct& product, int64_t m0, int64_t m1,
                            const Region& region, const Region& whole, int64_t tile,
                            bool equal, const Line& line, const Gather& gather) {
  const ConvAxis &y = product.y, &x = product.x;
  Windows windows;
  int64_t pending = 0;
  int64_t ox = m0 % x.rows, oy = m0 / x.rows % y.rows, n = m0 / x.rows / y.rows;
  for (int64_t m = m0 - ox; m < m1; m += x.rows) {  // of the line's first pixel
    const int64_t end = region.y.Has(oy) ? Min(region.x.end, m1 - m) : 0;
    const int64_t last = whole.y.Has(oy) ? Min(whole.x.end, end) : 0;
    ox = Max(ox, region.x.begin);
    while (ox < end) {
      if (ox >= whole.x.begin && last - ox > 1) {
        const int64_t left = last - ox;
        const int64_t rows =
            equal ? CeilDiv(left, CeilDiv(left, tile)) : Min(left, tile);
        line(m + ox, n, oy, ox, rows);
        ox += rows;
        continue;
      }
      PlaceWindow(product, n, oy, ox, m + ox, pending, &windows);
      if (++pending == tile) {
        gather(windows, pending);
        pending = 0;
      }
      ++ox;
    }
    ox = 0;
    if (++oy < y.rows) continue;
    oy = 0;
    ++n;
  }
  if (pending > 0) gather(windows, pending);
}
