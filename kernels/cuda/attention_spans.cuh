// What the backward pass of attention knows of segment ids before it begins: the least and the
// largest id of each tile and block of queries and of keys, and the ids of keys in whole
// blocks, the last one repeated, as copies by tensor map need them.
//
// There are kLists lists of spans, one for each size of tiles and blocks. A block of threads
// computes one span: those of the first list come first, of all examples.
#pragma once

#include "tile/common.cuh"
#include "tile/segment_map.cuh"

namespace tracea {

// Spans of `size` ids; whose ids are copied, too.
struct AttentionSpanList {
  const int* ids;  // (batch, length)
  SegmentSpan* spans;
  int* copies;  // (batch, whole tiles), or null
  int length, size;

  TRACEA_DEVICE int tiles() const { return ceil_div(length, size); }
};

// Least and largest of one number of each thread.
template <int kThreads>
TRACEA_DEVICE SegmentSpan span_of(SegmentSpan own) {
  __shared__ SegmentSpan of_warps[kThreads / kWarpSize];
  const SegmentSpan of_warp = {__reduce_min_sync(0xFFFFFFFFu, own.low),
                               __reduce_max_sync(0xFFFFFFFFu, own.high)};
  of_warps[threadIdx.x / kWarpSize] = of_warp;
  __syncthreads();
  SegmentSpan all = of_warps[0];
  TRACEA_UNROLL
  for (int i = 1; i < kThreads / kWarpSize; ++i) {
    all = {min(all.low, of_warps[i].low), max(all.high, of_warps[i].high)};
  }
  return all;
}

template <int kThreads, int kLists>
TRACEA_DEVICE void attention_spans(const AttentionSpanList (&lists)[kLists], int batch) {
  int index = static_cast<int>(blockIdx.x);
  AttentionSpanList list = lists[0];
  TRACEA_UNROLL
  for (int i = 1; i < kLists; ++i) {
    const int before = batch * list.tiles();
    if (index < before) break;
    index -= before;
    list = lists[i];
  }
  const int tiles = list.tiles(), example = index / tiles;
  const int first = (index - example * tiles) * list.size;
  const int* const ids = list.ids + static_cast<i64>(example) * list.length;
  SegmentSpan own = {0x7FFFFFFF, -0x7FFFFFFF - 1};
  for (int i = static_cast<int>(threadIdx.x); i < list.size; i += kThreads) {
    const int id = ids[min(first + i, list.length - 1)];
    own = {min(own.low, id), max(own.high, id)};
    if (list.copies != nullptr) {
      list.copies[static_cast<i64>(example) * tiles * list.size + first + i] = id;
    }
  }
  const SegmentSpan all = span_of<kThreads>(own);
  if (threadIdx.x == 0) list.spans[index] = all;
}

}  // namespace tracea
