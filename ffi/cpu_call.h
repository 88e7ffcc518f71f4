// What handlers of CPU kernels share: attributes, element types, refusals.

#ifndef TRACEA_FFI_CPU_CALL_H_
#define TRACEA_FFI_CPU_CALL_H_

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "gemm.h"
#include "xla/ffi/api/ffi.h"

namespace tracea {

// A caller's mistake, on its way to the handler's return value.
struct InvalidCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void RefuseCall(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw InvalidCall(text.str());
}

inline std::string ShapeText(const xla::ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t dim : buffer.dimensions()) {
    text += (text.empty() ? "" : ", ") + std::to_string(dim);
  }
  return "(" + text + ")";
}

template <typename T>
T CallAttribute(const xla::ffi::Dictionary& attrs, std::string_view name) {
  xla::ffi::ErrorOr<T> value = attrs.get<T>(name);
  if (value.has_error()) {
    RefuseCall("attribute '", name, "' is missing or has the wrong type: ",
               value.error().message());
  }
  return *value;
}

inline cpu::Activation ActivationOf(std::string_view name) {
  if (name == "none") return cpu::Activation::kNone;
  if (name == "relu") return cpu::Activation::kRelu;
  if (name == "gelu") return cpu::Activation::kGelu;
  if (name == "gelu_exact") return cpu::Activation::kGeluExact;
  if (name == "silu") return cpu::Activation::kSilu;
  RefuseCall("activation is '", name,
             "'; it must be one of none, relu, gelu, gelu_exact, silu.");
}

inline cpu::DType DTypeOf(const char* name, const xla::ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case xla::ffi::DataType::F32:
      return cpu::DType::kF32;
    case xla::ffi::DataType::BF16:
      return cpu::DType::kBF16;
    case xla::ffi::DataType::F16:
      return cpu::DType::kF16;
    default:
      RefuseCall(name, " has element type ", buffer.element_type(),
                 "; it must be one of F32, BF16, F16.");
  }
}

}  // namespace tracea

#endif  // TRACEA_FFI_CPU_CALL_H_
