#include "cuda_launch.h"

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

namespace tracea::cuda {

ffi::TypeId LaunchPlan::id = {};
const XLA_FFI_TypeInfo kLaunchPlanTypeInfo = ffi::MakeTypeInfo<LaunchPlan>();

namespace {

// ---- instantiate --------------------------------------------------------------------

template <typename T>
ffi::Error GetAttribute(const ffi::Dictionary& attributes, const char* name, T* value) {
  ffi::ErrorOr<T> found = attributes.get<T>(name);
  if (!found.has_value()) {
    return ffi::Error::InvalidArgument("Kernel launch: attribute " + std::string(name) +
                                       " is missing or has the wrong type: " +
                                       found.error().message());
  }
  *value = *found;
  return ffi::Error::Success();
}

ffi::Error Decode(const ffi::Dictionary& attributes, LaunchPlan* plan) {
  int64_t abi = 0;
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "abi", &abi));
  if (abi != kLaunchAbi) {
    return FailedPrecondition("The program was lowered for launch interface " +
                              std::to_string(abi) + " and this tracea_jax has " +
                              std::to_string(kLaunchAbi) +
                              ". Lower it again with this version.");
  }
  std::string_view key, entry, arch, sha256, embedded;
  ffi::Span<const int64_t> launch, params;
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "kernel_key", &key));
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "entry", &entry));
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "arch", &arch));
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "launch", &launch));
  TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "params", &params));
  if (attributes.contains("sha256")) {
    TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "sha256", &sha256));
  }
  if (attributes.contains("cubin")) {
    TRACEA_RETURN_IF_ERROR(GetAttribute(attributes, "cubin", &embedded));
  }
  plan->key = key;
  plan->entry = entry;
  plan->arch = arch;
  TRACEA_RETURN_IF_ERROR(DecodeLaunch(launch, params, &plan->spec));
  return ResolveCubin({key, arch, entry, sha256, embedded}, &plan->image);
}

ffi::ErrorOr<std::unique_ptr<LaunchPlan>> Instantiate(ffi::Dictionary attributes) {
  std::unique_ptr<LaunchPlan> plan;
  ffi::Error error = Guarded([&] {
    plan = std::make_unique<LaunchPlan>();
    return Decode(attributes, plan.get());
  });
  if (error.failure()) return ffi::Unexpected(error);
  return plan;
}

// ---- prepare, initialize ------------------------------------------------------------

// The plan's kernel in the scope's context. Costs one atomic read once it is loaded.
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

ffi::Error Load(LaunchPlan* plan, int32_t ordinal) {
  return Guarded([&] {
    // XLA passes -1 when it does not know the device yet; initialize or execute will.
    if (ordinal < 0 || plan->spec.empty()) return ffi::Error::Success();
    const Driver* driver = nullptr;
    TRACEA_RETURN_IF_ERROR(Driver::Get(&driver));
    ContextScope scope(*driver);
    TRACEA_RETURN_IF_ERROR(scope.Enter(ordinal));
    const LoadedKernel* kernel = nullptr;
    return Loaded(*driver, scope, plan, &kernel);
  });
}

// ---- execute ------------------------------------------------------------------------

using Operands = std::array<void*, kMaxOperands>;

ffi::Error Gather(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
                  const LaunchPlan& plan, Operands* operands) {
  const size_t given = arguments.size() + results.size();
  const auto used = static_cast<size_t>(plan.spec.num_operands);
  if (given < used) {
    return ffi::Error::InvalidArgument("Kernel " + plan.entry + " uses operand " +
                                       std::to_string(used - 1) + " of a call with " +
                                       std::to_string(given) +
                                       " arguments and results together.");
  }
  for (size_t i = 0; i < used; ++i) {
    if (i < arguments.size()) {
      ffi::ErrorOr<ffi::AnyBuffer> buffer = arguments.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return buffer.error();
      (*operands)[i] = buffer->untyped_data();
    } else {
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer =
          results.get<ffi::AnyBuffer>(i - arguments.size());
      if (!buffer.has_value()) return buffer.error();
      (*operands)[i] = (*buffer)->untyped_data();
    }
  }
  return ffi::Error::Success();
}

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

ffi::Error Execute(Stream stream, LaunchPlan* plan, int32_t ordinal,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return Guarded([&] {
    if (plan->spec.empty()) return ffi::Error::Success();
    const Driver* driver = nullptr;
    TRACEA_RETURN_IF_ERROR(Driver::Get(&driver));
    ContextScope scope(*driver);
    TRACEA_RETURN_IF_ERROR(scope.Enter(ordinal));
    const LoadedKernel* kernel = nullptr;
    TRACEA_RETURN_IF_ERROR(Loaded(*driver, scope, plan, &kernel));
    Operands operands;
    TRACEA_RETURN_IF_ERROR(Gather(arguments, results, *plan, &operands));
    return Launch(*driver, *kernel, *plan, operands, stream);
  });
}

}  // namespace
}  // namespace tracea::cuda

using namespace tracea::cuda;  // NOLINT: the symbols below must be global
namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_instantiate, Instantiate,
                              ffi::Ffi::BindInstantiate().Attrs());  // see cuda_launch.h

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_prepare, Load,
                              ffi::Ffi::BindPrepare()
                                  .Ctx<ffi::State<LaunchPlan>>()
                                  .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_initialize, Load,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<LaunchPlan>>()
                                  .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::State<LaunchPlan>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()   // kernel operands, arguments
                                  .RemainingRets(),  // and then results
                              {ffi::Traits::kCmdBufferCompatible});
