// The Python extension tracea_jax._native: FFI registrations and the cubin registry.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "cpu_attention.h"
#include "cpu_conv2d.h"
#include "cpu_gemm.h"
#include "cubin_registry.h"
#include "cuda_launch.h"
#include "launch_spec.h"
#include "sha256.h"

namespace nb = nanobind;

namespace {

template <typename Handler>
nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict CpuTarget(XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["execute"] = Capsule(execute);
  nb::dict target;
  target["platform"] = "cpu";
  target["stages"] = stages;
  return target;
}

// The tables that runtime/launch.py passes to jax.ffi, by target name.
nb::dict FfiTargets() {
  nb::dict cuda_stages;
  cuda_stages["instantiate"] = Capsule(tracea_cuda_launch_v1_instantiate);
  cuda_stages["prepare"] = Capsule(tracea_cuda_launch_v1_prepare);
  cuda_stages["initialize"] = Capsule(tracea_cuda_launch_v1_initialize);
  cuda_stages["execute"] = Capsule(tracea_cuda_launch_v1_execute);
  nb::dict state;
  state["type_id"] = nb::capsule(static_cast<void*>(&tracea::cuda::CallSite::id));
  state["type_info"] = nb::capsule(
      const_cast<XLA_FFI_TypeInfo*>(&tracea::cuda::kCallSiteTypeInfo));
  nb::dict cuda;
  cuda["platform"] = "CUDA";
  cuda["stages"] = cuda_stages;
  cuda["state"] = nb::make_tuple("tracea_cuda_launch_plan_v1", state);

  nb::dict targets;
  targets["tracea_cpu_attention_v1"] = CpuTarget(tracea_cpu_attention_v1);
  targets["tracea_cpu_attention_gradient_v1"] =
      CpuTarget(tracea_cpu_attention_gradient_v1);
  targets["tracea_cpu_conv2d_v1"] = CpuTarget(tracea_cpu_conv2d_v1);
  targets["tracea_cpu_gemm_v1"] = CpuTarget(tracea_cpu_gemm_v1);
  targets["tracea_cuda_launch_v1"] = cuda;
  return targets;
}

void PutCubin(const std::string& key, nb::bytes image) {
  std::string bytes(image.c_str(), image.size());
  if (const char* why_not = tracea::WhyNotCubin(bytes)) {
    const std::string message = "the image of kernel key " + key + " is no cubin: " + why_not;
    throw nb::value_error(message.c_str());
  }
  tracea::PutCubin(key, std::move(bytes));
}

nb::bytes ResolveCubin(const std::string& key, const std::string& arch,
                       const std::string& sha256, const std::string& embedded) {
  tracea::Image image;
  const tracea::ffi::Error error =
      tracea::ResolveCubin({key, arch, key, sha256, embedded}, &image);
  if (error.failure()) throw nb::value_error(error.message().c_str());
  return nb::bytes(image->bytes.data(), image->bytes.size());
}

void CheckLaunch(const std::vector<int64_t>& launch, const std::vector<int64_t>& params) {
  tracea::LaunchSpec spec;
  const tracea::ffi::Error error = tracea::DecodeLaunch(launch, params, &spec);
  if (error.failure()) throw nb::value_error(error.message().c_str());
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("ffi_targets", &FfiTargets,
        "Registrations by target name: platform, stages, and state if there is one.");
  m.def("put_cubin", &PutCubin, nb::arg("key"), nb::arg("image"),
        "Makes a compiled kernel known to this process.");
  m.def("has_cubin", &tracea::HasCubin, nb::arg("key"),
        "Whether a compiled kernel is known to this process.");
  m.def("resolve_cubin", &ResolveCubin, nb::arg("key"), nb::arg("arch"),
        nb::arg("sha256"), nb::arg("embedded") = "",
        "The image that the launcher would load; raises ValueError where it has none.");
  m.def(
      "sha256",
      [](nb::bytes bytes) { return tracea::Sha256({bytes.c_str(), bytes.size()}); },
      nb::arg("bytes"), "The digest as hexadecimal digits.");
  m.def(
      "set_cubin_directory",
      [](std::optional<std::string> path) {
        tracea::SetCubinDirectory(path.value_or(""));
      },
      nb::arg("path").none(), "Sets the cubin store that is searched; None for none.");
  m.def("check_launch", &CheckLaunch, nb::arg("launch"), nb::arg("params"),
        "Raises ValueError if the handler would refuse these attributes.");
  m.def(
      "cpu_isa", [] { return std::string(tracea::SupportedCpuIsa()); },
      "The widest instruction set that this processor and this build support.");
}
