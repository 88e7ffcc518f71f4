// The C interface: arguments checked, exceptions made statuses.

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "arithmetic.h"
#include "calls/attention_call.h"
#include "calls/conv2d_call.h"
#include "calls/gemm_call.h"
#include "context.h"
#include "cuda.h"
#include "failure.h"
#include "graph.h"

using namespace tracea;        // NOLINT: the functions are in the global namespace
using namespace tracea::capi;  // NOLINT

namespace {

constexpr int32_t kMostThreads = 4096;

// The sentences of a thread's last failures, in memory that is never freed while the
// thread lives: callers keep pointers to them. Nothing is allocated, as what failed may
// be an allocation.
class Errors {
 public:
  const char* last() const { return texts_[at_].data(); }

  void Add(const char* message) {
    at_ = (at_ + 1) % texts_.size();
    std::array<char, kBytes>& text = texts_[at_];
    size_t size = std::strlen(message);
    const bool fits = size < text.size();
    constexpr char kMore[] = "...";
    if (!fits) {
      size = text.size() - sizeof(kMore);
      while (IsInsideCharacter(message[size])) --size;
    }
    std::memcpy(text.data(), message, size);
    std::memcpy(text.data() + size, fits ? "" : kMore, fits ? 1 : sizeof(kMore));
  }

 private:
  static constexpr size_t kBytes = 2048;
  static bool IsInsideCharacter(char c) { return (c & 0xC0) == 0x80; }  // of UTF-8

  std::array<std::array<char, kBytes>, TRACEA_KEPT_ERRORS> texts_{};
  size_t at_ = 0;
};

Errors& ErrorsOfThread() {
  thread_local Errors errors;
  return errors;
}

tracea_status Failed(tracea_status status, const char* message) {
  ErrorsOfThread().Add(message);
  return status;
}

template <typename Body>
tracea_status Guarded(const Body& body) {
  try {
    body();
    return TRACEA_OK;
  } catch (const Failure& failure) {
    return Failed(failure.status, failure.what());
  } catch (const InvalidCall& error) {
    return Failed(TRACEA_INVALID, error.what());
  } catch (const std::bad_alloc&) {
    return Failed(TRACEA_CPU_ERROR, "There is not enough memory.");
  } catch (const std::exception& error) {
    return Failed(TRACEA_CPU_ERROR, error.what());
  } catch (...) {
    return Failed(TRACEA_CPU_ERROR, "Something unknown was thrown.");
  }
}

template <typename T>
void NotNull(const T* argument, const char* name) {
  if (!argument) Fail(TRACEA_INVALID, name, " is null.");
}

int64_t ThreadsOf(int32_t asked) {
  if (asked < 0 || asked > kMostThreads) {
    Fail(TRACEA_INVALID, "threads is ", asked, "; it must be from 0 to ", kMostThreads, ".");
  }
  if (asked > 0) return asked;
  return std::max<int64_t>(1, std::thread::hardware_concurrency());
}

void Describe(const std::vector<Named>& all, size_t index, tracea_spec* spec) {
  if (index >= all.size()) {
    Fail(TRACEA_INVALID, "index is ", index, "; the graph has ", all.size(), ".");
  }
  const Named& named = all[index];
  *spec = {named.name.c_str(), named.value.shape.data(),
           static_cast<int32_t>(named.value.shape.size()),
           static_cast<int32_t>(named.value.type)};
}

cpu::Activation ActivationOf(tracea_activation activation) {
  if (activation < TRACEA_NONE || activation > TRACEA_SILU) {
    Fail(TRACEA_INVALID, "activation is ", static_cast<int>(activation),
         "; there is none of it.");
  }
  return static_cast<cpu::Activation>(activation);
}

// Operands in order, the optional ones where they are given.
struct Operands {
  std::array<Array, 8> arrays;
  size_t count = 0;

  void Add(const Array& array) { arrays[count++] = array; }
  operator Arrays() const { return {arrays.data(), count}; }  // NOLINT
};

const char* ActivationName(tracea_activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_exact", "silu"};
  return kNames[static_cast<int>(ActivationOf(activation))];
}

// Runs a single operation on a GPU, by a kernel that a graph of the context brought.
// tracea_jax/bundle/direct.py makes the same name of the call.
void RunKernel(const tracea_context& context, const std::string& head,
               const Operands& operands, const Operands& results, void* stream) {
  std::ostringstream call = PlainText();
  std::array<void*, 16> arrays;
  size_t count = 0;
  call << head << ':';
  for (const Operands* some : {&operands, &results}) {
    for (size_t i = 0; i < some->count; ++i) {
      const Array& array = some->arrays[i];
      arrays[count++] = array.data;
      call << ' ' << DtypeName(static_cast<int32_t>(array.type)) << '[';
      for (size_t d = 0; d < array.dims.size(); ++d) {
        call << (d ? "," : "") << array.dims[d];
      }
      call << ']';
    }
  }
  const std::shared_ptr<const Action> kernel = context.kernels.Find(call.str());
  if (!kernel) {
    Fail(TRACEA_UNSUPPORTED, "no graph that the context has loaded has a kernel for '",
         call.str(), "': kernels for GPUs are compiled for one problem each. Bundle the "
         "operation with tracea_jax, and load that before.");
  }
  const CudaScope scope(context.device.ordinal);
  kernel->RunAt(arrays.data(), count, stream);
}

}  // namespace

extern "C" {

const char* tracea_version(void) { return TRACEA_VERSION; }

const char* tracea_last_error(void) { return ErrorsOfThread().last(); }

tracea_status tracea_context_create(tracea_device device, int32_t threads,
                                    tracea_context** context) {
  return Guarded([&] {
    NotNull(context, "context");
    *context = nullptr;
    auto made = std::make_unique<tracea_context>();
    made->device = device;
    if (device.platform == TRACEA_CPU) {
      made->threads = std::make_unique<Threads>(ThreadsOf(threads));
    } else if (device.platform == TRACEA_CUDA) {
      if (device.ordinal < 0) Fail(TRACEA_INVALID, "ordinal is ", device.ordinal, ".");
      const CudaScope scope(device.ordinal);
    } else {
      Fail(TRACEA_INVALID, "platform is ", device.platform, "; it must be 0 or 1.");
    }
    *context = made.release();
  });
}

void tracea_context_destroy(tracea_context* context) { delete context; }

tracea_status tracea_allocate(tracea_context* context, size_t bytes, void** memory) {
  return Guarded([&] {
    NotNull(context, "context");
    NotNull(memory, "memory");
    *memory = DeviceMemory(*context, bytes).release();
  });
}

tracea_status tracea_free(tracea_context* context, void* memory) {
  return Guarded([&] {
    NotNull(context, "context");
    DeviceMemory::Free(*context, memory);
  });
}

tracea_status tracea_copy(tracea_context* context, void* to, const void* from, size_t bytes,
                          tracea_stream stream) {
  return Guarded([&] {
    NotNull(context, "context");
    if (bytes > 0) NotNull(to, "to");
    if (bytes > 0) NotNull(from, "from");
    Copy(*context, to, from, bytes, stream);
  });
}

tracea_status tracea_synchronize(tracea_context* context, tracea_stream stream) {
  return Guarded([&] {
    NotNull(context, "context");
    if (!context->is_cuda()) return;
    const CudaScope scope(context->device.ordinal);
    CudaSynchronize(stream);
  });
}

// ---- graphs -------------------------------------------------------------------------

tracea_status tracea_graph_load(tracea_context* context, const char* path,
                                tracea_graph** graph) {
  return Guarded([&] {
    NotNull(graph, "graph");
    *graph = nullptr;
    NotNull(context, "context");
    NotNull(path, "path");
    *graph = new tracea_graph(*context, path);
  });
}

void tracea_graph_destroy(tracea_graph* graph) { delete graph; }

size_t tracea_graph_num_inputs(const tracea_graph* graph) {
  return graph ? graph->program.inputs.size() : 0;
}

size_t tracea_graph_num_outputs(const tracea_graph* graph) {
  return graph ? graph->program.outputs.size() : 0;
}

tracea_status tracea_graph_input(const tracea_graph* graph, size_t index,
                                 tracea_spec* spec) {
  return Guarded([&] {
    NotNull(graph, "graph");
    NotNull(spec, "spec");
    Describe(graph->program.inputs, index, spec);
  });
}

tracea_status tracea_graph_output(const tracea_graph* graph, size_t index,
                                  tracea_spec* spec) {
  return Guarded([&] {
    NotNull(graph, "graph");
    NotNull(spec, "spec");
    Describe(graph->program.outputs, index, spec);
  });
}

size_t tracea_graph_workspace_bytes(const tracea_graph* graph) {
  return graph ? static_cast<size_t>(graph->program.workspace_bytes) : 0;
}

tracea_status tracea_graph_run(const tracea_graph* graph, const tracea_tensor* inputs,
                               size_t num_inputs, const tracea_tensor* outputs,
                               size_t num_outputs, void* workspace, size_t workspace_bytes,
                               tracea_stream stream) {
  return Guarded([&] {
    NotNull(graph, "graph");
    graph->Run(inputs, num_inputs, outputs, num_outputs, workspace, workspace_bytes, stream);
  });
}

// ---- single operations --------------------------------------------------------------

tracea_status tracea_matmul(tracea_context* context, const tracea_tensor* lhs,
                            const tracea_tensor* rhs, const tracea_tensor* bias,
                            const tracea_tensor* residual, tracea_activation activation,
                            const tracea_tensor* out, tracea_stream stream) {
  return Guarded([&] {
    NotNull(context, "context");
    GemmOptions options;
    int64_t of_lhs[TRACEA_MAX_RANK], of_rhs[TRACEA_MAX_RANK];
    Operands operands, results;
    operands.Add(MatrixOf(*context, "lhs", lhs, &of_lhs, &options.trans_lhs));
    operands.Add(MatrixOf(*context, "rhs", rhs, &of_rhs, &options.trans_rhs));
    options.activation = ActivationOf(activation);
    if (bias) {
      options.bias = "row";
      operands.Add(ArrayOf(*context, "bias", bias));
    }
    if (residual) {
      options.has_residual = true;
      operands.Add(ArrayOf(*context, "residual", residual));
    }
    results.Add(ArrayOf(*context, "out", out));
    if (context->is_cuda()) {
      std::ostringstream head = PlainText();
      head << "matmul " << (options.trans_lhs ? 't' : 'n') << (options.trans_rhs ? 't' : 'n')
           << ' ' << ActivationName(activation) << " b" << (bias != nullptr) << " r"
           << (residual != nullptr);
      return RunKernel(*context, head.str(), operands, results, stream);
    }
    const XlaArithmetic arithmetic;
    RunGemm(*context->threads, options, operands, results);
  });
}

tracea_status tracea_conv2d(tracea_context* context, const tracea_tensor* x,
                            const tracea_tensor* w, const tracea_tensor* bias,
                            const tracea_tensor* residual,
                            const tracea_conv2d_options* given, const tracea_tensor* out, tracea_stream stream) {
  return Guarded([&] {
    NotNull(context, "context");
    const tracea_conv2d_options how = given ? *given : tracea_conv2d_options{};
    ConvOptions options;
    const auto extent = [&](int axis) {
      cpu::ConvExtent result{};
      result.stride = how.stride[axis] ? how.stride[axis] : 1;
      result.dilation = how.dilation[axis] ? how.dilation[axis] : 1;
      result.padding = how.padding[axis];
      if (result.stride < 1 || result.dilation < 1) {
        Fail(TRACEA_INVALID, "strides and dilation must not be negative.");
      }
      return result;
    };
    options.height = extent(0);
    options.width = extent(1);
    options.groups = how.groups ? how.groups : 1;
    if (options.groups < 1) Fail(TRACEA_INVALID, "groups must not be negative.");
    options.activation = ActivationOf(how.activation);
    options.isa = cpu::UsableConvIsa(cpu::kBestIsa);
    Operands operands, results;
    operands.Add(ArrayOf(*context, "x", x));
    operands.Add(ArrayOf(*context, "w", w));
    if ((options.has_bias = bias != nullptr)) {
      operands.Add(ArrayOf(*context, "bias", bias));
    }
    if ((options.has_residual = residual != nullptr)) {
      operands.Add(ArrayOf(*context, "residual", residual));
    }
    results.Add(ArrayOf(*context, "out", out));
    if (context->is_cuda()) {
      std::ostringstream head = PlainText();
      head << "conv2d " << options.height.stride << ',' << options.width.stride << ' '
           << options.height.dilation << ',' << options.width.dilation << ' '
           << options.height.padding << ',' << options.width.padding << ' '
           << options.groups << ' ' << ActivationName(how.activation) << " b"
           << (bias != nullptr) << " r" << (residual != nullptr);
      return RunKernel(*context, head.str(), operands, results, stream);
    }
    const XlaArithmetic arithmetic;
    RunConv(*context->threads, options, operands, results);
  });
}

tracea_status tracea_attention(tracea_context* context, const tracea_tensor* q,
                               const tracea_tensor* k, const tracea_tensor* v,
                               const tracea_tensor* bias, const tracea_tensor* mask,
                               const tracea_attention_options* given,
                               const tracea_tensor* out, tracea_stream stream) {
  return Guarded([&] {
    NotNull(context, "context");
    const tracea_attention_options how = given ? *given : tracea_attention_options{};
    AttentionOptions options;
    Operands operands, results;
    const Array of_q = ArrayOf(*context, "q", q);
    operands.Add(of_q);
    operands.Add(ArrayOf(*context, "k", k));
    operands.Add(ArrayOf(*context, "v", v));
    if ((options.has_bias = bias != nullptr)) {
      operands.Add(ArrayOf(*context, "bias", bias));
    }
    if ((options.has_mask = mask != nullptr)) {
      operands.Add(ArrayOf(*context, "mask", mask));
    }
    options.is_causal = how.is_causal != 0;
    const int64_t head_dim = of_q.dims.size() == 4 ? of_q.dims[3] : 1;
    options.scale = how.scale != 0 ? how.scale
                                   : 1 / std::sqrt(static_cast<float>(head_dim));
    results.Add(ArrayOf(*context, "out", out));
    if (context->is_cuda()) {
      std::ostringstream head = PlainText();
      head << "attention " << (options.is_causal ? "causal " : "full ") << options.scale;
      return RunKernel(*context, head.str(), operands, results, stream);
    }
    const XlaArithmetic arithmetic;
    RunAttention(*context->threads, options, operands, results);
  });
}

}  // extern "C"
