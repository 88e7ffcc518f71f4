// max_pool: maxima of windows of images with channels last, and the gradient of that.
//
//   y[n, i, j, c] = max over (a, b) of x[n, i s - p + a, j s - p + b, c]
//   dx[n, r, q, c] = sum of dy[n, i, j, c] over the windows whose first maximum is (r, q)
//
// Forward, a thread has a pack of channels of one window. Backward, it has one of a patch of
// stride x stride pixels: it finds the maxima of all windows that reach into the patch, and
// adds what these give it, in f32 and in an order that is always the same:
//
//   windows  |---i-1---|             kernel 3, stride 2: windows i - 1 and i reach into
//               |----i----|          the pixels of patch i
//   pixels   .  .  P  P  .
//
// What lies outside of the image is -inf. Of a window, the first entry is taken, and then each
// that the one taken is not >= to; so is NaN by JAX's own derivative.
#pragma once

#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

struct MaxPoolParams {
  int height, width, out_height, out_width, channels;
  int patches_down, patches_across;  // of an image, for the gradient
  i64 threads;                       // that have work
};

// One axis of the windows.
template <int kKernel, int kStride>
struct PoolAxis {
  static constexpr int kBefore = (kKernel - 1) / kStride;  // windows before a patch's own
  static constexpr int kRegion = kStride * kBefore + kKernel;  // entries that they see
};

// Of two halves: all bits where the first is >= the second, none elsewhere and for NaN.
template <class Element>
struct Halves {
  static constexpr bool kAreCompared = false;
};
template <>
struct Halves<f16> {
  static constexpr bool kAreCompared = true;
  TRACEA_DEVICE static u32 at_least(u32 a, u32 b) {
    u32 mask;
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
  }
};
#if __CUDA_ARCH__ >= 900
template <>
struct Halves<bf16> {
  static constexpr bool kAreCompared = true;
  TRACEA_DEVICE static u32 at_least(u32 a, u32 b) {
    u32 mask;
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
  }
};
#endif

// Which entry of a window is the first maximum, for each channel of a pack.
template <class Element, bool kIsPacked = Halves<Element>::kAreCompared>
class FirstMaximum {
 public:
  TRACEA_DEVICE explicit FirstMaximum(const Words& entry) : most_(Pack<Element>::from(entry)) {}

  TRACEA_DEVICE void meet(const Words& entry, int k) {
    const auto v = Pack<Element>::from(entry);
    TRACEA_UNROLL
    for (int c = 0; c < Pack<Element>::kSize; ++c) {
      const bool stays = most_.x[c] >= v.x[c];
      most_.x[c] = stays ? most_.x[c] : v.x[c];
      taken_[c] = stays ? taken_[c] : k;
    }
  }
  TRACEA_DEVICE bool is(int c, int k) const { return taken_[c] == k; }

 private:
  Pack<Element> most_;
  int taken_[Pack<Element>::kSize] = {};
};

// Two channels at once: bit k of a half says that entry k is taken.
template <class Element>
class FirstMaximum<Element, true> {
 public:
  TRACEA_DEVICE explicit FirstMaximum(const Words& entry) : most_(entry) {
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) taken_[i] = 0x00010001u;
  }

  TRACEA_DEVICE void meet(const Words& entry, int k) {
    TRACEA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const u32 stays = Halves<Element>::at_least(most_.w[i], entry.w[i]);
      most_.w[i] = (most_.w[i] & stays) | (entry.w[i] & ~stays);
      taken_[i] = (taken_[i] & stays) | ((0x00010001u << k) & ~stays);
    }
  }
  TRACEA_DEVICE bool is(int c, int k) const {
    return (taken_[c / 2] & (1u << (k + 16 * (c % 2)))) != 0;
  }

 private:
  Words most_;
  u32 taken_[4];
};

// Traits: Element; kKernelH, kKernelW, kStrideH, kStrideW, kPadH, kPadW (before the image).
template <class Traits>
class MaxPool {
 public:
  using Element = typename Traits::Element;
  using Values = Pack<Element>;
  static constexpr int kCount = Values::kSize;

  TRACEA_DEVICE static void forward(const Element* x, Element* y, const MaxPoolParams& p) {
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= p.threads) return;
    const Place at(thread, p.out_height, p.out_width, p.channels);
    const int top = at.row * Traits::kStrideH - Traits::kPadH;
    const int left = at.column * Traits::kStrideW - Traits::kPadW;
    Values most = outside();
    TRACEA_UNROLL
    for (int a = 0; a < Traits::kKernelH; ++a) {
      TRACEA_UNROLL
      for (int b = 0; b < Traits::kKernelW; ++b) {
        const Values v = Values::from(entry(x, p, at, top + a, left + b));
        TRACEA_UNROLL
        for (int i = 0; i < kCount; ++i) most.x[i] = max_nan(most.x[i], v.x[i]);
      }
    }
    store_pack(y + thread * kCount, most);
  }

  TRACEA_DEVICE static void gradient(const Element* x, const Element* dy, Element* dx,
                                     const MaxPoolParams& p) {
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= p.threads) return;
    const Place at(thread, p.patches_down, p.patches_across, p.channels);
    const int top = (at.row - Rows::kBefore) * Traits::kStrideH - Traits::kPadH;
    const int left = (at.column - Columns::kBefore) * Traits::kStrideW - Traits::kPadW;
    Words seen[Rows::kRegion][Columns::kRegion];  // as in memory: 16 bits take few registers
    TRACEA_UNROLL
    for (int a = 0; a < Rows::kRegion; ++a) {
      TRACEA_UNROLL
      for (int b = 0; b < Columns::kRegion; ++b) {
        seen[a][b] = entry(x, p, at, top + a, left + b);
      }
    }
    float sums[Traits::kStrideH][Traits::kStrideW][kCount] = {};
    TRACEA_UNROLL
    for (int i = 0; i <= Rows::kBefore; ++i) {
      TRACEA_UNROLL
      for (int j = 0; j <= Columns::kBefore; ++j) {
        add_window(seen, i, j, of_window(dy, p, at, i, j), sums);
      }
    }
    TRACEA_UNROLL
    for (int a = 0; a < Traits::kStrideH; ++a) {
      TRACEA_UNROLL
      for (int b = 0; b < Traits::kStrideW; ++b) {
        const int row = top + Rows::kBefore * Traits::kStrideH + a;
        const int column = left + Columns::kBefore * Traits::kStrideW + b;
        if (!is_inside(p, row, column)) continue;
        Values pack;
        TRACEA_UNROLL
        for (int c = 0; c < kCount; ++c) pack.x[c] = sums[a][b][c];
        store_pack(dx + pixel(p, at, row, column), pack);
      }
    }
  }

 private:
  using Rows = PoolAxis<Traits::kKernelH, Traits::kStrideH>;
  using Columns = PoolAxis<Traits::kKernelW, Traits::kStrideW>;

  // What a thread has: a pack of channels at (row, column) of an image.
  struct Place {
    int channel, column, row;
    i64 image;

    TRACEA_DEVICE Place(i64 thread, int rows, int columns, int channels) {
      const int packs = channels / kCount;
      const i64 place = thread / packs;
      channel = static_cast<int>(thread - place * packs) * kCount;
      const i64 line = place / columns;
      column = static_cast<int>(place - line * columns);
      image = line / rows;
      row = static_cast<int>(line - image * rows);
    }
  };

  TRACEA_DEVICE static Values outside() {
    Values values;
    TRACEA_UNROLL
    for (int i = 0; i < kCount; ++i) values.x[i] = __uint_as_float(0xFF800000u);  // -inf
    return values;
  }

  TRACEA_DEVICE static bool is_inside(const MaxPoolParams& p, int row, int column) {
    return row >= 0 && row < p.height && column >= 0 && column < p.width;
  }

  TRACEA_DEVICE static i64 pixel(const MaxPoolParams& p, const Place& at, int row,
                                 int column) {
    const i64 line = at.image * p.height + row;
    return (line * p.width + column) * p.channels + at.channel;
  }

  TRACEA_DEVICE static Words entry(const Element* x, const MaxPoolParams& p, const Place& at,
                                   int row, int column) {
    if (!is_inside(p, row, column)) return outside().words();
    return *reinterpret_cast<const Words*>(x + pixel(p, at, row, column));
  }

  // dy of window (i, j) of those that reach into the patch, or zeros.
  TRACEA_DEVICE static Values of_window(const Element* dy, const MaxPoolParams& p,
                                        const Place& at, int i, int j) {
    const int row = at.row - Rows::kBefore + i, column = at.column - Columns::kBefore + j;
    if (row < 0 || row >= p.out_height || column < 0 || column >= p.out_width) {
      return Values{};
    }
    const i64 line = at.image * p.out_height + row;
    return load_pack(dy + (line * p.out_width + column) * p.channels + at.channel);
  }

  // Adds a window's dy to that pixel of the patch that is its maximum, if one is.
  TRACEA_DEVICE static void add_window(
      const Words (&seen)[Rows::kRegion][Columns::kRegion], int i, int j, const Values& dy,
      float (&sums)[Traits::kStrideH][Traits::kStrideW][kCount]) {
    const int top = i * Traits::kStrideH, left = j * Traits::kStrideW;  // in the region
    FirstMaximum<Element> first(seen[top][left]);
    TRACEA_UNROLL
    for (int k = 1; k < Traits::kKernelH * Traits::kKernelW; ++k) {
      first.meet(seen[top + k / Traits::kKernelW][left + k % Traits::kKernelW], k);
    }
    TRACEA_UNROLL
    for (int a = 0; a < Traits::kStrideH; ++a) {
      TRACEA_UNROLL
      for (int b = 0; b < Traits::kStrideW; ++b) {
        // The patch is where its own window begins.
        const int row = (Rows::kBefore - i) * Traits::kStrideH + a;
        const int column = (Columns::kBefore - j) * Traits::kStrideW + b;
        if (row >= Traits::kKernelH || column >= Traits::kKernelW) continue;
        TRACEA_UNROLL
        for (int c = 0; c < kCount; ++c) {
          const bool is_it = first.is(c, row * Traits::kKernelW + column);
          sums[a][b][c] += is_it ? dy.x[c] : 0.0f;
        }
      }
    }
  }
};

}  // namespace tracea
