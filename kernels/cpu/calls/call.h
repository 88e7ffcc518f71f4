// What calls of CPU kernels are made of, whoever makes them: arrays, attributes, refusals
// and tasks, without any XLA type.
//
// A call has named attributes, which an operation parses once to options of its own, and
// arrays, which are checked each time. XLA's handlers (ffi/cpu_*.cc) and the C library
// (kernels/capi) both make calls, of the same attributes.

#ifndef TRACEA_KERNELS_CPU_CALLS_CALL_H_
#define TRACEA_KERNELS_CPU_CALLS_CALL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <locale>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "common/isa.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "common/types.h"

namespace tracea {

// A caller's mistake.
struct InvalidCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // not what the program has set
  (text << ... << parts);
  throw InvalidCall(text.str());
}

// ---- arrays -------------------------------------------------------------------------

enum class ArrayType : int32_t { kF32, kBF16, kF16, kF64, kC64, kC128, kPred, kS32, kOther };

inline std::ostream& operator<<(std::ostream& out, ArrayType type) {
  constexpr const char* kNames[] = {"F32",  "BF16", "F16", "F64",  "C64",
                                    "C128", "PRED", "S32", "OTHER"};
  return out << kNames[static_cast<int>(type)];
}

inline int64_t BytesOf(ArrayType type) {
  constexpr int64_t kBytes[] = {4, 2, 2, 8, 8, 16, 1, 4, 0};
  return kBytes[static_cast<int>(type)];
}

struct Dims {
  const int64_t* data;
  size_t count;

  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + count; }
  size_t size() const { return count; }
  int64_t operator[](size_t i) const { return data[i]; }
};

// A contiguous array that somebody else owns.
struct Array {
  void* data;
  ArrayType type;
  Dims dims;

  int64_t size() const {
    int64_t elements = 1;
    for (int64_t dim : dims) elements *= dim;
    return elements;
  }
  int64_t bytes() const { return size() * BytesOf(type); }
};

struct Arrays {
  const Array* data;
  size_t count;

  size_t size() const { return count; }
  const Array& operator[](size_t i) const { return data[i]; }
};

template <typename Sizes>
std::string ShapeText(const Sizes& dims) {
  std::string text;
  for (int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "(" + text + ")";
}

inline std::string ShapeText(const Array& array) { return ShapeText(array.dims); }

inline cpu::DType DTypeOf(const char* name, const Array& array) {
  switch (array.type) {
    case ArrayType::kF32:
      return cpu::DType::kF32;
    case ArrayType::kBF16:
      return cpu::DType::kBF16;
    case ArrayType::kF16:
      return cpu::DType::kF16;
    default:
      Refuse(name, " has element type ", array.type, "; it must be one of F32, BF16, F16.");
  }
}

inline int64_t ItemSize(cpu::DType type) { return type == cpu::DType::kF32 ? 4 : 2; }

// ---- attributes ---------------------------------------------------------------------

// Named values. `Find` is false where there is none of the name and type.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual bool Find(std::string_view name, bool* value) const = 0;
  virtual bool Find(std::string_view name, int64_t* value) const = 0;
  virtual bool Find(std::string_view name, double* value) const = 0;
  // The text lives as long as the attributes.
  virtual bool Find(std::string_view name, std::string_view* value) const = 0;
};

template <typename T>
T Attribute(const Attributes& attrs, std::string_view name) {
  T value;
  if (!attrs.Find(name, &value)) {
    Refuse("attribute '", name, "' is missing or has the wrong type.");
  }
  return value;
}

inline constexpr int64_t kMostSize = int64_t{1} << 31;

// A size that sums and products of a few such sizes do not overflow with.
inline int64_t SizeAttribute(const Attributes& attrs, const std::string& name,
                             int64_t least) {
  const auto value = Attribute<int64_t>(attrs, name);
  if (value < least || value >= kMostSize) {
    Refuse(name, "=", value, " must be ", least, " or more, and less than 2^31.");
  }
  return value;
}

// Refuses a program whose attributes have another meaning.
inline void CheckAbi(const Attributes& attrs, int64_t known) {
  const auto abi = Attribute<int64_t>(attrs, "abi");
  if (abi != known) {
    Refuse("the program was compiled for abi ", abi, " of this handler, which has abi ",
           known, "; clear the compilation cache.");
  }
}

inline cpu::Isa IsaAttribute(const Attributes& attrs) {
  const std::string name(Attribute<std::string_view>(attrs, "isa"));
  cpu::Isa isa;
  if (!cpu::ParseIsa(name.c_str(), &isa)) {
    Refuse("isa is '", name, "'; it must be one of ", cpu::kIsaNames, ".");
  }
  return isa;
}

inline cpu::Activation ParseActivation(std::string_view name) {
  if (name == "none") return cpu::Activation::kNone;
  if (name == "relu") return cpu::Activation::kRelu;
  if (name == "gelu") return cpu::Activation::kGelu;
  if (name == "gelu_exact") return cpu::Activation::kGeluExact;
  if (name == "silu") return cpu::Activation::kSilu;
  Refuse("activation is '", name,
         "'; it must be one of none, relu, gelu, gelu_exact, silu.");
}

inline cpu::Activation ActivationAttribute(const Attributes& attrs) {
  return ParseActivation(Attribute<std::string_view>(attrs, "activation"));
}

// ---- tasks --------------------------------------------------------------------------

// Threads that somebody else owns; safe to call from several threads.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t num_threads() const = 0;
  virtual void Schedule(std::function<void()> work) = 0;
};

// Calls body(task, workspace) for every task, on all threads, each with its own workspace.
template <typename Body>
void RunTasks(Pool& pool, int64_t tasks, int64_t workspace_bytes, const Body& body) {
  std::atomic<bool> out_of_memory{false};
  cpu::ParallelFor(
      tasks, std::max<int64_t>(pool.num_threads(), 1),
      [&pool](auto helper) {
        try {
          pool.Schedule(std::move(helper));
        } catch (const std::bad_alloc&) {  // helpers that run already need what `body` has
        }
      },
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
}

}  // namespace tracea

#endif  // TRACEA_KERNELS_CPU_CALLS_CALL_H_
