#include "launch_spec.h"

#include <algorithm>
#include <limits>

namespace tracea {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

ffi::Error Invalid(const std::string& sentence) {
  return ffi::Error::InvalidArgument("Kernel launch: " + sentence);
}

std::string Shape(const std::array<unsigned, 3>& shape) {
  return std::to_string(shape[0]) + "x" + std::to_string(shape[1]) + "x" +
         std::to_string(shape[2]);
}

std::string Number(int64_t value) { return std::to_string(value); }

// Fails unless low <= value <= high.
ffi::Error InRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return ffi::Error::Success();
  return Invalid(std::string(name) + " is " + Number(value) + "; it must be from " +
                 Number(low) + " to " + Number(high) + ".");
}

// Reads the numbers of `params` one by one; after the end it yields zeros and says so.
class Reader {
 public:
  explicit Reader(ffi::Span<const int64_t> numbers) : numbers_(numbers) {}

  bool done() const { return position_ >= numbers_.size(); }
  bool overrun() const { return position_ > numbers_.size(); }
  int64_t Next() {
    const size_t here = position_++;
    return here < numbers_.size() ? numbers_[here] : 0;
  }

 private:
  ffi::Span<const int64_t> numbers_;
  size_t position_ = 0;
};

ffi::Error DecodeShape(ffi::Span<const int64_t> launch, LaunchSpec* spec) {
  if (launch.size() != 10) {
    return Invalid("the attribute launch has " + Number(launch.size()) +
                   " numbers; it must have 10: grid, block, cluster and smem_bytes.");
  }
  constexpr int64_t kGridLimit[3] = {kMaxInt, 65535, 65535};
  constexpr int64_t kBlockLimit[3] = {1024, 1024, 64};
  for (int i = 0; i < 3; ++i) {
    TRACEA_RETURN_IF_ERROR(InRange("a grid dimension", launch[i], 0, kGridLimit[i]));
    TRACEA_RETURN_IF_ERROR(InRange("a block dimension", launch[3 + i], 1, kBlockLimit[i]));
    TRACEA_RETURN_IF_ERROR(InRange("a cluster dimension", launch[6 + i], 1, 16));
    spec->grid[i] = static_cast<unsigned>(launch[i]);
    spec->block[i] = static_cast<unsigned>(launch[3 + i]);
    spec->cluster[i] = static_cast<unsigned>(launch[6 + i]);
  }
  for (int i = 0; i < 3; ++i) {
    if (spec->grid[i] % spec->cluster[i] == 0) continue;
    return Invalid("the grid " + Shape(spec->grid) + " is no multiple of the cluster " +
                   Shape(spec->cluster) + ".");
  }
  TRACEA_RETURN_IF_ERROR(InRange("the number of threads of a block",
                                 launch[3] * launch[4] * launch[5], 1, 1024));
  TRACEA_RETURN_IF_ERROR(
      InRange("the number of blocks of a cluster", spec->cluster_size(), 1, 16));
  TRACEA_RETURN_IF_ERROR(InRange("smem_bytes", launch[9], 0, kMaxInt));
  spec->smem_bytes = static_cast<int>(launch[9]);
  return ffi::Error::Success();
}

// Bytes of an element by CUtensorMapDataType: u8, u16, u32, s32, u64, s64, f16, f32, f64,
// bf16, f32 ftz, tf32, tf32 ftz.
constexpr std::array<int64_t, 13> kElementBytes = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

// Below are the limits of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col, which
// themselves answer only CUDA_ERROR_INVALID_VALUE.

ffi::Error DecodeArray(Reader* reader, TensorMapSpec* map) {
  const int64_t dtype = reader->Next();
  const int64_t rank = reader->Next();
  TRACEA_RETURN_IF_ERROR(
      InRange("the element type of a tensor map", dtype, 0, kElementBytes.size() - 1));
  const char* of_rank =
      map->is_im2col ? "the rank of an im2col map" : "the rank of a tensor map";
  TRACEA_RETURN_IF_ERROR(InRange(of_rank, rank, map->is_im2col ? 3 : 1, 5));
  map->dtype = static_cast<int>(dtype);
  map->rank = static_cast<uint32_t>(rank);
  for (int i = 0; i < rank; ++i) {
    const int64_t dim = reader->Next();
    TRACEA_RETURN_IF_ERROR(
        InRange("a dimension of a tensor map", dim, 1, int64_t{1} << 32));
    map->dims[i] = static_cast<uint64_t>(dim);
  }
  for (int i = 0; i + 1 < rank; ++i) {
    const int64_t stride = reader->Next();
    TRACEA_RETURN_IF_ERROR(InRange("a stride of a tensor map", stride, 16,
                                   (int64_t{1} << 40) - 16));
    if (stride % 16 != 0) {
      return Invalid("a stride of a tensor map is " + Number(stride) +
                     " bytes; it must be a multiple of 16.");
    }
    map->strides[i] = static_cast<uint64_t>(stride);
  }
  return ffi::Error::Success();
}

// The box of a tiled map.
ffi::Error DecodeBox(Reader* reader, TensorMapSpec* map) {
  map->element_strides.fill(1);
  for (uint32_t i = 0; i < map->rank; ++i) {
    const int64_t box = reader->Next();
    TRACEA_RETURN_IF_ERROR(InRange("a box dimension of a tensor map", box, 1, 256));
    map->box[i] = static_cast<uint32_t>(box);
  }
  return ffi::Error::Success();
}

// The pixels of an im2col map.
ffi::Error DecodePixels(Reader* reader, TensorMapSpec* map) {
  const uint32_t spatial = map->rank - 2;
  // A corner has 16 bits, divided among the spatial dimensions.
  constexpr int64_t kCornerLimit[3] = {32768, 128, 16};
  const int64_t limit = kCornerLimit[spatial - 1];
  for (std::array<int, 3>* corner : {&map->pixels.lower, &map->pixels.upper}) {
    for (uint32_t i = 0; i < spatial; ++i) {
      const int64_t offset = reader->Next();
      TRACEA_RETURN_IF_ERROR(
          InRange("a corner of an im2col map", offset, -limit, limit - 1));
      (*corner)[i] = static_cast<int>(offset);
    }
  }
  for (uint32_t i = 0; i < spatial; ++i) {
    const int64_t extent = static_cast<int64_t>(map->dims[i + 1]) +
                           map->pixels.upper[i] - map->pixels.lower[i];
    if (extent >= 1) continue;
    return Invalid("the corners of an im2col map leave " + Number(extent) +
                   " positions of a dimension of " +
                   Number(static_cast<int64_t>(map->dims[i + 1])) +
                   "; there must be 1 or more.");
  }
  const int64_t channels = reader->Next();
  const int64_t pixels = reader->Next();
  TRACEA_RETURN_IF_ERROR(InRange("the channels of an im2col map", channels, 1, 256));
  TRACEA_RETURN_IF_ERROR(InRange("the pixels of an im2col map", pixels, 1, 1024));
  map->pixels.channels = static_cast<uint32_t>(channels);
  map->pixels.pixels = static_cast<uint32_t>(pixels);
  for (uint32_t i = 0; i < map->rank; ++i) {
    const int64_t stride = reader->Next();
    TRACEA_RETURN_IF_ERROR(InRange("an element stride of an im2col map", stride, 1, 8));
    map->element_strides[i] = static_cast<uint32_t>(stride);
  }
  return ffi::Error::Success();
}

ffi::Error DecodeTensorMap(Reader* reader, bool is_im2col, TensorMapSpec* map) {
  *map = TensorMapSpec{};
  map->is_im2col = is_im2col;
  TRACEA_RETURN_IF_ERROR(DecodeArray(reader, map));
  TRACEA_RETURN_IF_ERROR(is_im2col ? DecodePixels(reader, map) : DecodeBox(reader, map));
  const int64_t swizzle = reader->Next();
  TRACEA_RETURN_IF_ERROR(InRange("the swizzle of a tensor map", swizzle, 0, 3));
  map->swizzle = static_cast<int>(swizzle);
  const std::string box = is_im2col ? "the pixel of an im2col map has rows of "
                                    : "the box of a tensor map has rows of ";
  const uint32_t elements = is_im2col ? map->pixels.channels : map->box[0];
  const int64_t row_bytes = elements * kElementBytes[map->dtype];
  if (row_bytes % 16 != 0) {
    return Invalid(box + Number(row_bytes) + " bytes; it must be a multiple of 16.");
  }
  const int64_t pattern_bytes = 16 << swizzle;  // 32, 64, 128 for swizzle 1, 2, 3
  if (swizzle != 0 && row_bytes > pattern_bytes) {
    return Invalid(box + Number(row_bytes) +
                   " bytes; its swizzle pattern allows at most " + Number(pattern_bytes) +
                   ".");
  }
  return ffi::Error::Success();
}

ffi::Error DecodeParam(Reader* reader, LaunchSpec* spec) {
  ParamSpec param{};
  const int64_t kind = reader->Next();
  TRACEA_RETURN_IF_ERROR(InRange("the kind of a parameter", kind, 0, 4));
  param.kind = static_cast<ParamKind>(kind);
  const int64_t value = reader->Next();
  switch (param.kind) {
    case ParamKind::kScalar32:
      // The bits count, not the sign: both signed and unsigned values are welcome.
      TRACEA_RETURN_IF_ERROR(InRange("a 32-bit scalar", value, -kMaxInt - 1,
                                     std::numeric_limits<uint32_t>::max()));
      [[fallthrough]];
    case ParamKind::kScalar64:
      param.scalar = static_cast<uint64_t>(value);
      break;
    case ParamKind::kPointer:
    case ParamKind::kTensorMap:
    case ParamKind::kIm2colMap: {
      const bool is_map = param.kind != ParamKind::kPointer;
      TRACEA_RETURN_IF_ERROR(InRange("the operand of a parameter", value, is_map ? 0 : -1,
                                     static_cast<int64_t>(kMaxOperands) - 1));
      param.operand = static_cast<int>(value);
      spec->num_operands = std::max(spec->num_operands, param.operand + 1);
      if (!is_map) break;
      param.map = spec->maps.size();
      TRACEA_RETURN_IF_ERROR(DecodeTensorMap(
          reader, param.kind == ParamKind::kIm2colMap, &spec->maps.emplace_back()));
      break;
    }
  }
  spec->params.push_back(param);
  return ffi::Error::Success();
}

}  // namespace

std::string LaunchSpec::ToString() const {
  return "grid " + Shape(grid) + ", block " + Shape(block) + ", cluster " +
         Shape(cluster) + ", " + Number(smem_bytes) + " bytes of dynamic shared memory";
}

ffi::Error DecodeLaunch(ffi::Span<const int64_t> launch, ffi::Span<const int64_t> params,
                        LaunchSpec* spec) {
  *spec = LaunchSpec{};
  TRACEA_RETURN_IF_ERROR(DecodeShape(launch, spec));
  // An empty problem launches nothing, and its tensor maps would have no extent.
  if (spec->empty()) return ffi::Error::Success();
  for (Reader reader(params); !reader.done();) {
    ffi::Error error = DecodeParam(&reader, spec);
    if (reader.overrun()) {
      return Invalid("the last record of the attribute params is incomplete.");
    }
    TRACEA_RETURN_IF_ERROR(error);
  }
  if (spec->params.size() > kMaxParams || spec->maps.size() > kMaxTensorMaps) {
    return Invalid("it has " + Number(spec->params.size()) + " parameters with " +
                   Number(spec->maps.size()) + " tensor maps; at most " +
                   Number(kMaxParams) + " and " + Number(kMaxTensorMaps) +
                   " are supported.");
  }
  return ffi::Error::Success();
}

}  // namespace tracea
