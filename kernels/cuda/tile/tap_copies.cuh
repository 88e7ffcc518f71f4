// Copies of the operands of a convolution that is computed as a product: rows of pixels, and
// rows of weights, whose columns run over filter taps and the channels of each.
//
//   column c of a row, in units of 16 bytes:   tap (i, j) = divmod(c / units, taps of a row)
//                                              unit c % units of the channels
//
// No unit lies across two taps, and a thread keeps its column of the tiles: one walk over
// taps (TapWalk) tells where all its rows are read. What lies outside of an image, of a
// tap's channels or behind the last tap is zero, and is not read.
//
// Assumes pixels and rows of weights in multiples of 16 bytes, at most kMostTaps taps of an
// axis, and images and weights of fewer than 2^31 units.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/common.cuh"
#include "tile/conv_axis.cuh"
#include "tile/fast_divide.cuh"
#include "tile/operand_map.cuh"

namespace tracea {

constexpr int kTapUnitBytes = 16;
constexpr int kMostTaps = 15;  // of an axis: bits 15 and 31 are never set

// A walk along one axis, and the divisor by its extent.
struct DividedAxis {
  ConvAxis walk;
  FastDivisor extent;
};

// Images in units: pixels of `pitch`, of which `depth` units are read from `first` on.
struct UnitImages {
  const void* data;
  int height, width, pitch, first, depth;

  // Whether a row or column exists, which may be negative.
  TRACEA_DEVICE static bool is_below(int index, int size) {
    return static_cast<u32>(index) < static_cast<u32>(size);
  }
  // The unit where a pixel begins, inside of its image or not.
  TRACEA_DEVICE int pixel(int image, int row, int column) const {
    return ((image * height + row) * width + column) * pitch + first;
  }
  TRACEA_DEVICE const u8* at(int unit) const {
    return static_cast<const u8*>(data) + static_cast<i64>(unit) * kTapUnitBytes;
  }
};

// Result `index` of all images.
TRACEA_DEVICE Pixel pixel_of(const DividedAxis& h, const DividedAxis& w, int index) {
  const u32 line = w.extent.divide(index), image = h.extent.divide(line);
  return {static_cast<int>(image), static_cast<int>(line - image * h.extent.divisor),
          static_cast<int>(index - line * w.extent.divisor)};
}
// Its position in the source, before taps are added.
TRACEA_DEVICE Pixel position_of(const DividedAxis& h, const DividedAxis& w, int index) {
  const Pixel at = pixel_of(h, w, index);
  return {at.image, h.walk.position(at.row), w.walk.position(at.column)};
}

// Where a thread stands among the columns of the operands.
class TapWalk {
 public:
  // `unit`: the thread's first, `depth`: units of a tap.
  TRACEA_DEVICE TapWalk(const ConvAxis& h, const ConvAxis& w, int depth, int unit)
      : h_(h), w_(w), depth_(depth), i_(0), j_(0), unit_(unit) {
    settle();
  }

  TRACEA_DEVICE void advance(int units) {
    unit_ += units;
    settle();
  }

  TRACEA_DEVICE bool is_inside() const { return i_ < h_.taps; }
  TRACEA_DEVICE int unit() const { return unit_; }
  TRACEA_DEVICE int row() const { return h_.offset(i_); }  // from a pixel's position
  TRACEA_DEVICE int column() const { return w_.offset(j_); }
  TRACEA_DEVICE int tap(int kernel_width) const {
    return h_.tap(i_) * kernel_width + w_.tap(j_);
  }
  // Those that `taps_inside` has for a pixel that sees this tap; more than it ever has
  // behind the last one.
  TRACEA_DEVICE u32 bits() const { return is_inside() ? 1u << i_ | 0x10000u << j_ : ~0u; }

  // A bit for each row and each column of taps that a position sees inside of its image.
  TRACEA_DEVICE static u32 taps_inside(const ConvAxis& h, const ConvAxis& w,
                                       const UnitImages& images, const Pixel& at) {
    u32 inside = 0;
    TRACEA_NO_UNROLL
    for (int i = 0; i < h.taps; ++i) {
      if (UnitImages::is_below(at.row + h.offset(i), images.height)) inside |= 1u << i;
    }
    TRACEA_NO_UNROLL
    for (int j = 0; j < w.taps; ++j) {
      if (UnitImages::is_below(at.column + w.offset(j), images.width)) inside |= 0x10000u << j;
    }
    return inside;
  }

 private:
  TRACEA_DEVICE void settle() {
    while (unit_ >= depth_ && i_ < h_.taps) {
      unit_ -= depth_;
      if (++j_ >= w_.taps) {
        j_ = 0;
        ++i_;
      }
    }
  }

  const ConvAxis &h_, &w_;
  const int depth_;
  int i_, j_, unit_;
};

// A unit in memory; zeros are copied where there is none.
struct TapSource {
  const u8* data;
  bool exists;
};

// A tile of kRows by kColumns that threads copy in units: which of them each has, and where
// they go. The copies below say where they come from.
template <class Element, class Swizzle, int kRows, int kColumns, int kThreads, int kParts>
class TapTile {
 public:
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  using Map =
      CopyMap<Swizzle, kRows, kColumns * kElementBytes, kTapUnitBytes, kThreads>;
  static constexpr int kBytes = Map::kBytes, kRowBytes = Map::kRowBytes;
  static constexpr int kUnitsPerPart = ceil_div(Map::kUnits, kParts);
  static_assert(!Map::kIsWide, "a thread keeps its column");

  TRACEA_DEVICE static int first_unit() { return Map::first_byte(thread()) / kTapUnitBytes; }

 protected:
  TRACEA_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }

  // Starts the copies of a part; `source(i)` is the thread's unit i, see TapSource.
  template <class Source>
  TRACEA_DEVICE static void start_part(u32 smem, int part, Source&& source) {
    TRACEA_UNROLL
    for (int j = 0; j < kUnitsPerPart; ++j) {
      const int i = part * kUnitsPerPart + j;
      if (i >= Map::kUnits) break;
      const TapSource from = source(i);
      cp_async_or_zero<kTapUnitBytes>(smem + Map::byte(thread(), i), from.data, from.exists);
    }
  }
};

// Tiles of kRows positions by columns. It moves the walk that weights are copied by, too.
template <class Element, class Swizzle, int kRows, int kColumns, int kThreads, int kParts>
class PixelCopy
    : public TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts> {
 public:
  using Tile = TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts>;
  using Map = typename Tile::Map;

  // From position `first` of all images on, of `count`.
  TRACEA_DEVICE PixelCopy(const UnitImages& images, const DividedAxis& h, const DividedAxis& w,
                          int first, int count, TapWalk& walk)
      : images_(images), walk_(walk) {
    first += Map::first_row(thread());
    TRACEA_UNROLL
    for (int i = 0; i < Map::kUnits; ++i) {
      const int index = first + Map::rows_to(i);
      const Pixel at = position_of(h, w, index);
      pixels_[i] = images.pixel(at.image, at.row, at.column);
      inside_[i] = index < count ? TapWalk::taps_inside(h.walk, w.walk, images, at) : 0;
    }
  }

  TRACEA_DEVICE void start(u32 smem, int part) const {
    const u32 bits = walk_.bits();
    const int unit =
        walk_.unit() + (walk_.row() * images_.width + walk_.column()) * images_.pitch;
    Tile::start_part(smem, part, [&](int i) -> TapSource {
      return {images_.at(pixels_[i] + unit), (inside_[i] & bits) == bits};
    });
  }
  TRACEA_DEVICE void finish(u32, int) const {}

  TRACEA_DEVICE void advance() { walk_.advance(Tile::kRowBytes / kTapUnitBytes); }

 private:
  using Tile::thread;

  const UnitImages images_;
  TapWalk& walk_;
  int pixels_[Map::kUnits];  // in units
  u32 inside_[Map::kUnits];  // see `taps_inside`
};

// Tiles of kRows positions by columns, whose walk stands still while positions advance.
template <class Element, class Swizzle, int kRows, int kColumns, int kThreads, int kParts>
class TapCopy
    : public TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts> {
 public:
  using Tile = TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts>;
  using Map = typename Tile::Map;

  // From position `first` of all images on, of `count`, and from column `unit`.
  TRACEA_DEVICE TapCopy(const UnitImages& images, const DividedAxis& h, const DividedAxis& w,
                        int first, int count, int unit)
      : images_(images), h_(h), w_(w), first_(first + Map::first_row(thread())) {
    const TapWalk walk(h.walk, w.walk, images.depth,
                       unit + Tile::first_unit());
    row_ = walk.row();
    column_ = walk.column();
    unit_ = walk.unit();
    count_ = walk.is_inside() ? count : 0;
  }

  TRACEA_DEVICE void start(u32 smem, int part) const {
    Tile::start_part(smem, part, [&](int i) -> TapSource {
      const int index = first_ + Map::rows_to(i);
      const Pixel at = position_of(h_, w_, index);
      const int row = at.row + row_, column = at.column + column_;
      return {images_.at(images_.pixel(at.image, row, column) + unit_),
              index < count_ && UnitImages::is_below(row, images_.height) &&
                  UnitImages::is_below(column, images_.width)};
    });
  }
  TRACEA_DEVICE void finish(u32, int) const {}
  TRACEA_DEVICE void advance() { first_ += kRows; }

 private:
  using Tile::thread;

  const UnitImages images_;
  const DividedAxis &h_, &w_;
  int first_, count_;         // positions
  int row_, column_, unit_;  // of the tap, from a position
};

// Weights (taps, kRows, channels) as tiles of kRows by taps and channels: the transposed
// filters of a gradient. It is read where the walk stands, which the pixels' copy moves.
template <class Element, class Swizzle, int kRows, int kColumns, int kThreads, int kParts>
class TapWeightsCopy
    : public TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts> {
 public:
  using Tile = TapTile<Element, Swizzle, kRows, kColumns, kThreads, kParts>;
  using Map = typename Tile::Map;

  // `rows` of a tap, of `pitch` units each, of which the tile begins with row `row` and
  // unit `first`.
  TRACEA_DEVICE TapWeightsCopy(const void* weights, int kernel_width, int rows, int pitch,
                               int row, int first, const TapWalk& walk)
      : walk_(walk), kernel_width_(kernel_width), tap_units_(rows * pitch), pitch_(pitch) {
    row += Map::first_row(thread());
    rows_left_ = rows - row;
    source_ = static_cast<const u8*>(weights) +
              (static_cast<i64>(row) * pitch + first) * kTapUnitBytes;
  }

  TRACEA_DEVICE void start(u32 smem, int part) const {
    const int unit = walk_.tap(kernel_width_) * tap_units_ + walk_.unit();
    Tile::start_part(smem, part, [&](int i) -> TapSource {
      return {source_ + static_cast<i64>(unit + Map::rows_to(i) * pitch_) * kTapUnitBytes,
              walk_.is_inside() && Map::rows_to(i) < rows_left_};
    });
  }
  TRACEA_DEVICE void finish(u32, int) const {}
  TRACEA_DEVICE void advance() const {}

 private:
  using Tile::thread;

  const TapWalk& walk_;
  const int kernel_width_, tap_units_, pitch_;
  int rows_left_;
  const u8* source_;
};

}  // namespace tracea
