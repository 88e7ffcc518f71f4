// A block's place in a matrix of rows and channels, and sums over its rows.
//
//   thread 0 .. kLanes - 1            packs of channels of one row
//   thread kLanes .. 2 kLanes - 1     the same packs of the next row, and so on
//
// Tiles of kTile * kRows neighbouring rows go to the blocks (0, y), (1, y), ... in turn, so that
// all blocks are at work in one stretch of memory. Block (x, y) has the packs from y * kLanes on.
// Threads that are left over, fewer than kLanes, do nothing.
#pragma once

#include "tile/common.cuh"
#include "tile/pack.cuh"

namespace tracea {

template <class Element, int kThreads, int kLanes, int kTile>
struct BlockColumns {
  static constexpr int kCount = Pack<Element>::kSize;  // channels of a thread
  static constexpr int kRows = kThreads / kLanes;      // that a block has at once
  static_assert(kRows >= 1, "a row of packs is at most a row of threads");

  int pack;        // of the thread
  int begin, end;  // the thread's rows: kTile of them from `begin` on, kRows apart; then
  int stride;      // rows to the next tile
  i64 first;       // element of row `begin`
  i64 step;        // elements from one row of a tile to the next of the thread

  TRACEA_DEVICE BlockColumns(int rows, int channels) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int row = static_cast<int>(threadIdx.x) / kLanes;
    pack = static_cast<int>(blockIdx.y) * kLanes + lane;
    begin = static_cast<int>(blockIdx.x) * (kTile * kRows) + row;
    end = row < kRows && pack * kCount < channels ? rows : 0;
    stride = static_cast<int>(gridDim.x) * (kTile * kRows);
    first = static_cast<i64>(begin) * channels + pack * kCount;
    step = static_cast<i64>(kRows) * channels;
  }
};

// Adds kSums numbers of each channel over the rows of a block, in an order that is always
// the same, and writes each sum's channels to `out`, which has kSums rows of `channels`.
template <class Columns, int kThreads, int kLanes, int kSums>
TRACEA_DEVICE void store_column_sums(const float (&sums)[kSums][Columns::kCount], float* out,
                                     int channels) {
  constexpr int kValues = kSums * Columns::kCount;
  __shared__ float shared[kValues][kThreads + 1];
  const int thread = static_cast<int>(threadIdx.x);
  TRACEA_UNROLL
  for (int s = 0; s < kSums; ++s) {
    TRACEA_UNROLL
    for (int i = 0; i < Columns::kCount; ++i) {
      shared[s * Columns::kCount + i][thread] = sums[s][i];
    }
  }
  __syncthreads();
  const int block = static_cast<int>(blockIdx.y) * kLanes * Columns::kCount;
  for (int at = thread; at < kValues * kLanes; at += kThreads) {
    const int value = at / kLanes, lane = at % kLanes;
    float sum = 0.0f;
    TRACEA_UNROLL
    for (int row = 0; row < Columns::kRows; ++row) sum += shared[value][row * kLanes + lane];
    const int channel = block + lane * Columns::kCount + value % Columns::kCount;
    if (channel < channels) out[value / Columns::kCount * channels + channel] = sum;
  }
}

}  // namespace tracea
