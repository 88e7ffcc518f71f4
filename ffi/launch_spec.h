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
enum class ParamKind : int64_t {
  kPointer = 0,    // operand (-1: null)
  kScalar32 = 1,   // value
  kScalar64 = 2,   // value
  kTensorMap = 3,  // operand, dtype, rank, dims(rank), strides(rank-1), box(rank), swizzle
};

struct TensorMapSpec {
  int dtype;  // CUtensorMapDataType
  uint32_t rank;
  std::array<uint64_t, 5> dims;     // elements, innermost first
  std::array<uint64_t, 4> strides;  // bytes, of dims[1:]
  std::array<uint32_t, 5> box;      // elements
  int swizzle;                      // CUtensorMapSwizzle
};

struct ParamSpec {
  ParamKind kind;
  int operand;      // pointer and tensor map
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
