// What kernels of norms compute, and their arguments. Of entries that share a mean,
//
//   y = activation((x - mean) * (scale / sqrt(variance + epsilon)) + bias)
//
// and mean and inverse = 1 / sqrt(variance + epsilon), which the gradients take. With
// n = (x - mean) * inverse and dz = activation'(n * scale + bias) * dy,
//
//   dscale = sum of dz * n,   dbias = sum of dz            over all entries of a channel
//   dx = inverse * (dz * scale - mean of (dz * scale) - n * mean of (dz * scale * n))
//
// where means are over the entries that share one. A kernel of gradients leaves sums of a
// part of the entries, and who called adds them.
#pragma once

namespace tracea {

struct NormParams {
  const void *x, *scale, *bias;
  void* y;
  float *mean, *inverse;
  int rows, channels;  // rows: of an image, its pixels
  float epsilon;
};

struct NormBackwardParams {
  const void *x, *scale, *bias;
  const float *mean, *inverse;
  const void* dy;
  void* dx;
  float* sums;  // (parts, 2, channels): of dz * n, and of dz
  int rows, channels;
};

}  // namespace tracea
