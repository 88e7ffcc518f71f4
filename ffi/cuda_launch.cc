#include "cuda_launch.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "status.h"

namespace tracea::cuda {

ffi::TypeId CallSite::id = {};
const XLA_FFI_TypeInfo kCallSiteTypeInfo = ffi::MakeTypeInfo<CallSite>();

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

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  std::unique_ptr<CallSite> site;
  ffi::Error error = Guarded([&] {
    site = std::make_unique<CallSite>();
    return Decode(attributes, &site->plan);
  });
  if (error.failure()) return ffi::Unexpected(error);
  return site;
}

// ---- prepare, initialize ------------------------------------------------------------

ffi::Error Load(CallSite* site, int32_t ordinal) {
  return Guarded([&] {
    LaunchPlan* plan = &site->plan;
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

ffi::Error Execute(Stream stream, CallSite* site, int32_t ordinal,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return Guarded([&] {
    LaunchPlan* plan = &site->plan;
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
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_initialize, Load,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cuda_launch_v1_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::State<CallSite>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()   // kernel operands, arguments
                                  .RemainingRets(),  // and then results
                              {ffi::Traits::kCmdBufferCompatible});
