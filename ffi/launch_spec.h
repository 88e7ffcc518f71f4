// The launch of one kernel as the attributes of its call describe it, decoded and checked.
// Pure host code: nothing here needs CUDA. runtime/launch.py writes the encoding.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace tracea {

inline constexpr int kLaunchAbi = 1;      // version of the encoding below
inline constexpr size_t kMaxParams = 64;  // limits of the arrays built at each launch
inline constexpr size_t kMaxTensorMaps = 16;
inline constexpr size_t kMaxOperands = 64;

// The first number of each record in `params`.
//
// Both kinds of scalars carry bits: a number whose low bytes are the parameter's, be it an
// integer or a float. A kernel copies as many bytes as its parameter has.
enum class ParamKind : int64_t {
  kPointer = 0,    // operand (-1: null)
  kScalar32 = 1,   // value of up to 32 bits
  kScalar64 = 2,   // value of 64 bits
  kTensorMap = 3,  // operand, dtype, rank, dims(rank), strides(rank-1), box(rank), swizzle
  kIm2colMap = 4,  // operand, dtype, rank, dims(rank), strides(rank-1), lower(rank-2),
                   // upper(rank-2), channels, pixels, element strides(rank), swizzle
};

// What an im2col map has in place of a box; see cuTensorMapEncodeIm2col.
struct PixelsSpec {
  std::array<int, 3> lower;  // corners of the box of positions, innermost first
  std::array<int, 3> upper;
  uint32_t channels;  // that one copy moves of each pixel
  uint32_t pixels;    // that one copy moves
};

struct TensorMapSpec {
  bool is_im2col;
  int dtype;  // CUtensorMapDataType
  uint32_t rank;
  std::array<uint64_t, 5> dims;             // elements, innermost first
  std::array<uint64_t, 4> strides;          // bytes, of dims[1:]
  std::array<uint32_t, 5> box;              // elements; of tiled maps
  PixelsSpec pixels;                        // of im2col maps
  std::array<uint32_t, 5> element_strides;  // all 1 in tiled maps
  int swizzle;                              // CUtensorMapSwizzle
};

struct ParamSpec {
  ParamKind kind;
  int operand;      // pointer and maps
  uint64_t scalar;  // scalars
  size_t map;       // index into LaunchSpec::maps
};

struct LaunchSpec {
  std::array<unsigned, 3> grid;     // blocks
  std::array<unsigned, 3> block;    // threads
  std::array<unsigned, 3> cluster;  // blocks
  int smem_bytes;                   // dynamic
  std::vector<ParamSpec> params;
  std::vector<TensorMapSpec> maps;
  int num_operands;  // one more than the largest operand index

  bool empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  unsigned cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
  std::string ToString() const;
};

// Decodes `launch` = [grid, block, cluster, smem_bytes] and the records of `params`.
// INVALID_ARGUMENT says which rule is broken.
ffi::Error DecodeLaunch(ffi::Span<const int64_t> launch, ffi::Span<const int64_t> params,
                        LaunchSpec* spec);

}  // namespace tracea
