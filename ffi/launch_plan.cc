#include "launch_plan.h"

#include <cstdint>

#include "status.h"

namespace tracea::cuda {
namespace {

ffi::Error Encode(const Driver& driver, const LaunchPlan& plan, const ParamSpec& param,
                  void* address, TensorMap* out) {
  const TensorMapSpec& map = plan.spec.maps[param.map];
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    return ffi::Error::InvalidArgument(
        "Operand " + std::to_string(param.operand) + " of kernel " + plan.entry +
        " is read or written with TMA and must be aligned to 16 bytes; its address is " +
        std::to_string(reinterpret_cast<uintptr_t>(address)) +
        ". Pass implementation=\"xla\" for this operation.");
  }
  // Of rows that are no whole lines, boxes begin anywhere in one and reach into the next:
  // with pairs of lines, L2 would fetch up to twice as much (measured: products 8 to 10 %
  // slower, those of whole lines as fast).
  constexpr uint64_t kLineBytes = 128;
  const int promotion =
      map.strides[0] % kLineBytes == 0 ? kL2Promotion256B : kL2Promotion128B;
  Result result = 0;
  if (map.is_im2col) {
    if (driver.tensor_map_encode_im2col == nullptr) {
      return FailedPrecondition("Kernel " + plan.entry +
                                " needs cuTensorMapEncodeIm2col, which the CUDA driver "
                                "does not have. Install an NVIDIA driver for CUDA 12 or "
                                "later, or pass implementation=\"xla\".");
    }
    const PixelsSpec& copy = map.pixels;
    result = driver.tensor_map_encode_im2col(
        out, map.dtype, map.rank, address, map.dims.data(), map.strides.data(),
        copy.lower.data(), copy.upper.data(), copy.channels, copy.pixels,
        map.element_strides.data(), kInterleaveNone, map.swizzle, promotion, kOobFillNone);
  } else {
    result = driver.tensor_map_encode_tiled(
        out, map.dtype, map.rank, address, map.dims.data(), map.strides.data(),
        map.box.data(), map.element_strides.data(), kInterleaveNone, map.swizzle,
        promotion, kOobFillNone);
  }
  if (result == 0) return ffi::Error::Success();
  const char* name = map.is_im2col ? "cuTensorMapEncodeIm2col" : "cuTensorMapEncodeTiled";
  return driver.Check(result, std::string(name) + " for operand " +
                                  std::to_string(param.operand) + " of kernel " +
                                  plan.entry);
}

}  // namespace

ffi::Error Loaded(const Driver& driver, const ContextScope& scope, LaunchPlan* plan,
                  const LoadedKernel** kernel) {
  const auto device = static_cast<size_t>(scope.device());
  const bool has_slot = device < plan->loaded.size();
  if (has_slot) {
    *kernel = plan->loaded[device].load(std::memory_order_acquire);
    if (*kernel != nullptr && (*kernel)->context == scope.context()) {
      return ffi::Error::Success();
    }
  }
  const KernelImage image{plan->key, plan->entry, plan->arch, *plan->image};
  TRACEA_RETURN_IF_ERROR(LoadKernel(driver, scope, image, plan->spec, kernel));
  if (has_slot) plan->loaded[device].store(*kernel, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Launch(const Driver& driver, const LoadedKernel& kernel, const LaunchPlan& plan,
                  const Operands& operands, Stream stream) {
  const LaunchSpec& spec = plan.spec;
  // cuLaunchKernelEx copies each parameter from its address; all live on this stack.
  std::array<TensorMap, kMaxTensorMaps> maps;
  std::array<uint64_t, kMaxParams> values;
  std::array<void*, kMaxParams> addresses;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const ParamSpec& param = spec.params[i];
    void* buffer = param.operand >= 0 ? operands[param.operand] : nullptr;
    addresses[i] = &values[i];
    switch (param.kind) {
      case ParamKind::kPointer:
        values[i] = reinterpret_cast<uintptr_t>(buffer);
        break;
      case ParamKind::kScalar32:  // little-endian: the low half comes first
      case ParamKind::kScalar64:
        values[i] = param.scalar;
        break;
      case ParamKind::kTensorMap:
      case ParamKind::kIm2colMap:
        addresses[i] = &maps[param.map];
        TRACEA_RETURN_IF_ERROR(Encode(driver, plan, param, buffer, &maps[param.map]));
        break;
    }
  }
  LaunchAttribute cluster{};
  cluster.id = kLaunchAttributeClusterDimension;
  cluster.value.cluster = {spec.cluster[0], spec.cluster[1], spec.cluster[2]};
  LaunchConfig config{};
  for (int i = 0; i < 3; ++i) {
    config.grid[i] = spec.grid[i];
    config.block[i] = spec.block[i];
  }
  config.smem_bytes = static_cast<unsigned>(spec.smem_bytes);
  config.stream = stream;
  config.attributes = &cluster;
  config.num_attributes = spec.cluster_size() > 1 ? 1 : 0;
  const Result result =
      driver.launch(&config, kernel.function, addresses.data(), nullptr);
  if (result == 0) return ffi::Error::Success();
  return driver.Check(result, "Launching kernel " + plan.entry + " (" + plan.arch + ", " +
                                  spec.ToString() + ")");
}

}  // namespace tracea::cuda
