// What the handlers of CPU kernels share: attributes, element types, refusals, tasks.

#ifndef TRACEA_FFI_CPU_CALL_H_
#define TRACEA_FFI_CPU_CALL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "common/isa.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "gemm/gemm.h"
#include "xla/ffi/api/ffi.h"

namespace tracea {

// A caller's mistake, on its way to the handler's return value.
struct InvalidCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw InvalidCall(text.str());
}

template <typename Dims>
std::string ShapeText(const Dims& dims) {
  std::string text;
  for (int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "(" + text + ")";
}

inline std::string ShapeText(const xla::ffi::AnyBuffer& buffer) {
  return ShapeText(buffer.dimensions());
}

template <typename T>
T Attribute(const xla::ffi::Dictionary& attrs, std::string_view name) {
  xla::ffi::ErrorOr<T> value = attrs.get<T>(name);
  if (value.has_error()) {
    Refuse("attribute '", name, "' is missing or has the wrong type: ",
           value.error().message());
  }
  return *value;
}

// Refuses a program whose attributes have another meaning.
inline void CheckAbi(const xla::ffi::Dictionary& attrs, int64_t known) {
  const auto abi = Attribute<int64_t>(attrs, "abi");
  if (abi != known) {
    Refuse("the program was compiled for abi ", abi, " of this handler, which has abi ",
           known, "; clear the compilation cache.");
  }
}

inline cpu::Isa IsaAttribute(const xla::ffi::Dictionary& attrs) {
  const std::string name(Attribute<std::string_view>(attrs, "isa"));
  cpu::Isa isa;
  if (!cpu::ParseIsa(name.c_str(), &isa)) {
    Refuse("isa is '", name, "'; it must be one of ", cpu::kIsaNames, ".");
  }
  return isa;
}

inline cpu::Activation ActivationAttribute(const xla::ffi::Dictionary& attrs) {
  const auto name = Attribute<std::string_view>(attrs, "activation");
  if (name == "none") return cpu::Activation::kNone;
  if (name == "relu") return cpu::Activation::kRelu;
  if (name == "gelu") return cpu::Activation::kGelu;
  if (name == "gelu_exact") return cpu::Activation::kGeluExact;
  if (name == "silu") return cpu::Activation::kSilu;
  Refuse("activation is '", name,
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
      Refuse(name, " has element type ", buffer.element_type(),
             "; it must be one of F32, BF16, F16.");
  }
}

inline int64_t ItemSize(cpu::DType type) { return type == cpu::DType::kF32 ? 4 : 2; }

// Calls body(task, workspace) for every task, on all threads, each with its own workspace.
template <typename Body>
xla::ffi::Error RunTasks(xla::ffi::ThreadPool& pool, int64_t tasks,
                         int64_t workspace_bytes, const Body& body) {
  std::atomic<bool> out_of_memory{false};
  cpu::ParallelFor(
      tasks, std::max<int64_t>(pool.num_threads(), 1),
      [&pool](auto helper) { pool.Schedule(std::move(helper)); },
      [&](int64_t task) {
        if (float* workspace = cpu::ThreadWorkspace(workspace_bytes)) {
          body(task, workspace);
        } else {
          out_of_memory = true;
        }
      });
  if (out_of_memory) {
    throw OutOfMemory("a thread could not allocate " + std::to_string(workspace_bytes) +
                      " bytes of workspace; choose smaller blocks.");
  }
  return xla::ffi::Error::Success();
}

// A handler's way from an exception to XLA's error.
template <typename Body>
xla::ffi::Error Guarded(const char* handler, const Body& body) {
  const auto named = [&](const std::string& text) {
    return std::string(handler) + ": " + text;
  };
  try {
    return body();
  } catch (const InvalidCall& error) {
    return xla::ffi::Error::InvalidArgument(named(error.what()));
  } catch (const OutOfMemory& error) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, named(error.what()));
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(named(error.what()));
  }
}

}  // namespace tracea

#endif  // TRACEA_FFI_CPU_CALL_H_
