// A slab of an image, and sums over all of it: what the kernels of group norms share.
//
//   image (pixels, channels)          a slab: whole groups of channels, all pixels
//   +--------+--------+-----
//   | block 0|        |               A cluster has a slab. Each of its blocks has some of
//   |--------|        |               the pixels; a row of its threads has one pixel at a
//   | block 1|        |               time, each thread a pack of 16 bytes of channels.
//   |--------|        |
//     ...
//
// A thread has the same channels of all its pixels, so it sums on its own; the sums of the
// threads of a block are added in shared memory, and those of the blocks of a cluster through
// distributed shared memory. Orders are fixed: runs are alike bit by bit.
//
// What a block reads stays in its shared memory where it has room (kKeeps): a thread copies
// and reads its own packs only, and waits for nobody.
//
// Assumes channels in multiples of a pack, and images aligned to 16 bytes.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/sync.cuh"
#include "tile/activation.cuh"
#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

// Traits: Element; kGroup, channels of a group; kLanes, packs of a slab; kThreads; kCluster;
// kKeeps; kArrays, how many arrays are read, and kept.
template <class Traits>
class NormSlab {
 public:
  using Element = typename Traits::Element;
  static constexpr int kPack = Pack<Element>::kSize;
  static constexpr int kChannels = Traits::kLanes * kPack;
  static constexpr int kGroups = kChannels / Traits::kGroup;
  static constexpr int kRows = Traits::kThreads / Traits::kLanes;  // pixels at a time
  static constexpr int kStride = Traits::kThreads + 4;  // no two lanes in one bank
  static constexpr int kWarps = Traits::kThreads / kWarpSize;
  static constexpr int kSharers = 8;  // threads that add up what others have of a channel
  static_assert(kChannels % Traits::kGroup == 0, "a slab has whole groups");
  static_assert(kRows >= 1, "a thread has one pack of a pixel");
  static_assert(Traits::kCluster <= 8, "clusters of more blocks are not portable");

  // Of each of two numbers: of the threads, of the block, of the whole slab, of groups.
  struct Shared {
    float threads[2 * kPack][kStride];
    alignas(16) float block[2][kChannels];
    alignas(16) float slab[2][kChannels];
    float groups[2][kGroups];
  };
  // What precedes the packs that stay.
  static constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;

  TRACEA_DEVICE NormSlab(u8* smem, int pixels, int channels)
      : shared_(*reinterpret_cast<Shared*>(smem)),
        kept_(smem + kSharedBytes + threadIdx.x * sizeof(Words)),
        pixels_(pixels),
        stride_(channels) {
    const int slabs = ceil_div(channels, kChannels);
    const int cluster = static_cast<int>(blockIdx.x / Traits::kCluster);
    rank_ = Traits::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
    image_ = cluster / slabs;
    first_ = cluster % slabs * kChannels;
    const int thread = static_cast<int>(threadIdx.x);
    lane_ = thread % Traits::kLanes;
    row_ = thread / Traits::kLanes;
    channel_ = first_ + lane_ * kPack;
    is_on_ = row_ < kRows && channel_ < channels;
    count_ = is_on_ ? pixels_of(rank_, row_) : 0;
    at_ = (static_cast<i64>(image_) * pixels + rank_ * chunk() + row_) * channels + channel_;
  }

  TRACEA_DEVICE int image() const { return image_; }
  TRACEA_DEVICE int rank() const { return rank_; }
  TRACEA_DEVICE bool is_on() const { return is_on_; }
  TRACEA_DEVICE int count() const { return count_; }         // of the thread's pixels
  TRACEA_DEVICE int channel() const { return channel_; }     // the thread's first
  TRACEA_DEVICE int first_channel() const { return first_; }  // of the slab
  TRACEA_DEVICE int local_channel(int i) const { return lane_ * kPack + i; }
  TRACEA_DEVICE Shared& shared() const { return shared_; }
  TRACEA_DEVICE i64 address(int i) const {
    return at_ + static_cast<i64>(i) * kRows * stride_;
  }

  // Begins to copy what the thread has of the arrays.
  template <class... Arrays>
  TRACEA_DEVICE void fetch(const Arrays*... arrays) const {
    if constexpr (Traits::kKeeps) {
      static_assert(sizeof...(arrays) == Traits::kArrays, "each array that is kept");
      fetch_part<0>(arrays...);
      fetch_part<1>(arrays...);
      fetch_part<2>(arrays...);
      fetch_part<3>(arrays...);
    }
  }

  // f(packs of pixel i, i) for all pixels of the thread, as they arrive.
  template <class F, class... Arrays>
  TRACEA_DEVICE void for_each_arriving(F f, const Arrays*... arrays) const {
    if constexpr (Traits::kKeeps) {
      cp_async_wait_group<3>();
      for_each_of<0>(f, arrays...);
      cp_async_wait_group<2>();
      for_each_of<1>(f, arrays...);
      cp_async_wait_group<1>();
      for_each_of<2>(f, arrays...);
      cp_async_wait_group<0>();
      for_each_of<3>(f, arrays...);
    } else {
      for_each(f, arrays...);
    }
  }

  // The same once more.
  template <class F, class... Arrays>
  TRACEA_DEVICE void for_each(F f, const Arrays*... arrays) const {
    range(f, 0, count_, arrays...);
  }

  // Sums of all threads that have the same channels, in each block of the cluster:
  // shared().slab.
  TRACEA_DEVICE void add_up(const float (&a)[kPack], const float (&b)[kPack]) {
    publish(a, b);
    for_each_column([&](int c, int r0) {
      float sums[2] = {};
      TRACEA_UNROLL
      for (int k = 0; k < 2; ++k) {
        for_each_row(r0, [&](int r) { sums[k] += published(k, c, r); });
        sums[k] = share_sum(sums[k]);
        if (r0 == 0 && c < kChannels) shared_.block[k][c] = sums[k];
      }
    });
    meet();
    for (int q = static_cast<int>(threadIdx.x); q < kChannels / 2; q += Traits::kThreads) {
      const u32 mine = shared_address(&shared_.block[0][0]) + q * sizeof(Quad);
      Quad sum = {};
      TRACEA_UNROLL
      for (int r = 0; r < Traits::kCluster; ++r) {
        const Quad other = block_quad(mine, r);
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) sum.x[i] += other.x[i];
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) (&shared_.slab[0][0])[4 * q + i] = sum.x[i];
    }
    __syncthreads();
  }

  // The same of means, and of sums of squared distances from them (T. F. Chan et al.,
  // Updating formulae and a pairwise algorithm for computing sample variances, 1979). What
  // has no pixels has zeros.
  TRACEA_DEVICE void merge(const float (&mean)[kPack], const float (&squares)[kPack]) {
    publish(mean, squares);
    const int pixels = pixels_of_block(rank_);
    const float share = pixels > 0 ? 1.0f / static_cast<float>(pixels) : 0.0f;
    for_each_column([&](int c, int r0) {
      float sum = 0.0f, all = 0.0f;
      for_each_row(r0, [&](int r) {
        sum = fmaf(static_cast<float>(pixels_of(rank_, r)), published(0, c, r), sum);
      });
      const float center = share_sum(sum) * share;
      for_each_row(r0, [&](int r) {
        const float d = published(0, c, r) - center;
        const float n = static_cast<float>(pixels_of(rank_, r));
        all += fmaf(n * d, d, published(1, c, r));
      });
      all = share_sum(all);
      if (r0 == 0 && c < kChannels) {
        shared_.block[0][c] = center;
        shared_.block[1][c] = all;
      }
    });
    meet();
    for (int q = static_cast<int>(threadIdx.x); q < kChannels / 4; q += Traits::kThreads) {
      const u32 at = shared_address(&shared_.block[0][4 * q]);
      Quad means[Traits::kCluster], mean = {}, squares = {};
      TRACEA_UNROLL
      for (int r = 0; r < Traits::kCluster; ++r) {
        means[r] = block_quad(at, r);
        const float n = static_cast<float>(pixels_of_block(r));
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) mean.x[i] = fmaf(n, means[r].x[i], mean.x[i]);
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) mean.x[i] /= static_cast<float>(pixels_);
      TRACEA_UNROLL
      for (int r = 0; r < Traits::kCluster; ++r) {
        const Quad own = block_quad(at + kChannels * sizeof(float), r);
        const float n = static_cast<float>(pixels_of_block(r));
        TRACEA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float d = means[r].x[i] - mean.x[i];
          squares.x[i] += fmaf(n * d, d, own.x[i]);
        }
      }
      TRACEA_UNROLL
      for (int i = 0; i < 4; ++i) {
        shared_.slab[0][4 * q + i] = mean.x[i];
        shared_.slab[1][4 * q + i] = squares.x[i];
      }
    }
    __syncthreads();
  }

  // f(group, a lane's sum over the channels of its slab, lane) for each group of the slab, by
  // a warp each.
  template <class F>
  TRACEA_DEVICE void for_each_group(F f) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    for (int g = warp; g < kGroups; g += kWarps) {
      if (first_ + g * Traits::kGroup < stride_) f(g);
    }
  }

  // The sum of f(channel of the slab) over a group, in all lanes of a warp.
  template <class F>
  TRACEA_DEVICE static float group_sum(int group, F f) {
    float sum = 0.0f;
    for (int c = static_cast<int>(threadIdx.x) % kWarpSize; c < Traits::kGroup; c += kWarpSize) {
      sum += f(group * Traits::kGroup + c);
    }
    TRACEA_UNROLL
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, bit);
    return sum;
  }

  // The first of the slab's groups.
  TRACEA_DEVICE int first_group() const { return first_ / Traits::kGroup; }
  TRACEA_DEVICE int groups() const { return stride_ / Traits::kGroup; }

  // No block may end while others read its shared memory.
  TRACEA_DEVICE void leave() const {
    if constexpr (Traits::kCluster > 1) cluster_barrier();
  }

 private:
  TRACEA_DEVICE int chunk() const { return ceil_div(pixels_, Traits::kCluster); }
  TRACEA_DEVICE int pixels_of_block(int rank) const {
    const int left = pixels_ - rank * chunk();
    return left < 0 ? 0 : left < chunk() ? left : chunk();
  }
  // Of a row of threads.
  TRACEA_DEVICE int pixels_of(int rank, int row) const {
    const int left = pixels_of_block(rank) - row;
    return left > 0 ? (left + kRows - 1) / kRows : 0;
  }

  TRACEA_DEVICE int part(int quarter) const { return count_ * quarter / 4; }

  template <int kQuarter, class... Arrays>
  TRACEA_DEVICE void fetch_part(const Arrays*... arrays) const {
    for (int i = part(kQuarter); i < part(kQuarter + 1); ++i) {
      int a = 0;
      ((cp_async_or_zero<16>(shared_address(place(i, a++)), arrays + address(i), true)), ...);
    }
    cp_async_commit_group();
  }
  template <int kQuarter, class F, class... Arrays>
  TRACEA_DEVICE void for_each_of(F f, const Arrays*... arrays) const {
    range(f, part(kQuarter), part(kQuarter + 1), arrays...);
  }
  template <class F, class... Arrays>
  TRACEA_DEVICE void range(F f, int begin, int end, const Arrays*... arrays) const {
#pragma unroll 4
    for (int i = begin; i < end; ++i) {
      int a = 0;
      f(i, Pack<Element>::from(load(i, a++, arrays))...);
    }
  }
  TRACEA_DEVICE u8* place(int i, int array) const {
    return kept_ + (i * Traits::kArrays + array) * Traits::kThreads * sizeof(Words);
  }
  TRACEA_DEVICE Words load(int i, int array, const Element* from) const {
    if constexpr (Traits::kKeeps) {
      return *reinterpret_cast<const Words*>(place(i, array));
    } else {
      return *reinterpret_cast<const Words*>(from + address(i));
    }
  }

  TRACEA_DEVICE void publish(const float (&a)[kPack], const float (&b)[kPack]) {
    TRACEA_UNROLL
    for (int i = 0; i < kPack; ++i) {
      shared_.threads[i][threadIdx.x] = a[i];
      shared_.threads[kPack + i][threadIdx.x] = b[i];
    }
    __syncthreads();
  }
  // f(channel, the first of the rows that the thread adds up) by eight threads for each
  // channel of the block. All lanes of a warp take part, some with channels beyond the last.
  template <class F>
  TRACEA_DEVICE static void for_each_column(F f) {
    constexpr int kOfWarp = kWarpSize / kSharers;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll 2
    for (int c = warp * kOfWarp; c < kChannels; c += kWarps * kOfWarp) {
      f(c + lane / kSharers, lane % kSharers);
    }
  }
  template <class F>
  TRACEA_DEVICE static void for_each_row(int first, F f) {
#pragma unroll 8
    for (int r = first; r < kRows; r += kSharers) f(r);
  }
  // The sum over the threads that share a channel, in all of them.
  TRACEA_DEVICE static float share_sum(float v) {
    TRACEA_UNROLL
    for (int bit = kSharers / 2; bit > 0; bit /= 2) {
      v += __shfl_xor_sync(0xFFFFFFFFu, v, bit);
    }
    return v;
  }
  TRACEA_DEVICE float published(int number, int channel, int row) const {
    if (channel >= kChannels) return 0.0f;
    return shared_.threads[number * kPack + channel % kPack]
                          [row * Traits::kLanes + channel / kPack];
  }
  TRACEA_DEVICE void meet() const {
    if constexpr (Traits::kCluster > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }
  TRACEA_DEVICE static Quad block_quad(u32 mine, int rank) {
    return ld_shared_cluster(cluster_address(mine, static_cast<u32>(rank)));
  }

  Shared& shared_;
  u8* kept_;
  int pixels_, stride_, rank_, image_, first_, lane_, row_, channel_, count_;
  bool is_on_;
  i64 at_;
};

}  // namespace tracea
