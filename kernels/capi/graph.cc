#include "graph.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "arithmetic.h"
#include "cuda.h"
#include "failure.h"

// ---- memory -------------------------------------------------------------------------

namespace tracea::capi {

namespace {
constexpr size_t kAlignment = 64;
}  // namespace

DeviceMemory::DeviceMemory(const tracea_context& context, size_t bytes)
    : context_(context) {
  if (bytes == 0) return;
  if (context.is_cuda()) {
    const CudaScope scope(context.device.ordinal);
    memory_ = CudaAllocate(bytes);
    return;
  }
  const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  memory_ = whole < bytes ? nullptr : std::aligned_alloc(kAlignment, whole);
  if (!memory_) Fail(TRACEA_CPU_ERROR, "There are no ", bytes, " bytes of memory.");
}

DeviceMemory::~DeviceMemory() {
  try {
    Free(context_, memory_);
  } catch (const std::exception&) {  // of a context that is lost, with all its memory
  }
}

void* DeviceMemory::release() { return std::exchange(memory_, nullptr); }

void DeviceMemory::Free(const tracea_context& context, void* memory) {
  if (!memory) return;
  if (!context.is_cuda()) {
    std::free(memory);
    return;
  }
  const CudaScope scope(context.device.ordinal);
  CudaFree(memory);
}

void Copy(const tracea_context& context, void* to, const void* from, size_t bytes,
          void* stream) {
  if (bytes == 0) return;
  if (!context.is_cuda()) {
    std::memcpy(to, from, bytes);
    return;
  }
  const CudaScope scope(context.device.ordinal);
  CudaCopy(to, from, bytes, stream);
}

void* Addresses::of(const Value& value) const {
  switch (value.storage) {
    case Storage::kInput:
      return inputs[value.index];
    case Storage::kOutput:
      return outputs[value.index];
    case Storage::kConstants:
      return constants + value.offset;
    case Storage::kWorkspace:
      break;
  }
  return workspace + value.offset;
}

}  // namespace tracea::capi

// ---- graphs -------------------------------------------------------------------------

using namespace tracea;        // NOLINT: the class is in the global namespace
using namespace tracea::capi;  // NOLINT

namespace {

// The program for the context's device.
Program Fitting(const tracea_context& context, const std::string& path) {
  Program program = ReadProgram(path);
  const bool is_cuda = program.platform == TRACEA_CUDA;
  if (is_cuda != context.is_cuda()) {
    const auto name = [](bool cuda) { return cuda ? "NVIDIA GPUs" : "CPUs"; };
    Fail(TRACEA_UNSUPPORTED, path, " was made for ", name(is_cuda),
         " and the context is one of ", name(context.is_cuda()),
         "; bundle the function for that device.");
  }
#if defined(__aarch64__)
  const char* machine = "aarch64";
#else
  const char* machine = "x86_64";
#endif
  if (!is_cuda && program.arch != machine) {
    Fail(TRACEA_UNSUPPORTED, path, " was made for processors of ", program.arch,
         "; this one is ", machine, ". Bundle the function there.");
  }
  return program;
}

// The data of a run's input or output, which must be what the graph takes.
void* Checked(const tracea_context& context, const char* kind, const Named& named,
              const tracea_tensor& tensor) {
  const std::string name = std::string(kind) + " " + named.name;
  const Array array = ArrayOf(context, name.c_str(), &tensor);
  const auto& shape = named.value.shape;
  if (array.dims.size() != shape.size() ||
      !std::equal(shape.begin(), shape.end(), array.dims.begin())) {
    Fail(TRACEA_INVALID, name, " has the shape ", ShapeText(array), "; the graph has ",
         ShapeText(shape), ".");
  }
  if (array.type != named.value.type) {
    Fail(TRACEA_INVALID, name, " has the dtype ", DtypeName(tensor.dtype),
         "; the graph has ", DtypeName(static_cast<int32_t>(named.value.type)), ".");
  }
  return array.data;
}

std::vector<void*> Checked(const tracea_context& context, const char* kind,
                           const std::vector<Named>& wanted, const tracea_tensor* given,
                           size_t count) {
  if (count != wanted.size()) {
    Fail(TRACEA_INVALID, "got ", count, " ", kind, "s; the graph has ", wanted.size(), ".");
  }
  if (count > 0 && !given) Fail(TRACEA_INVALID, "the ", kind, "s are null.");
  std::vector<void*> data;
  data.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    data.push_back(Checked(context, kind, wanted[i], given[i]));
  }
  return data;
}

}  // namespace

tracea_graph::tracea_graph(const tracea_context& of, const std::string& path)
    : context(of),
      program(Fitting(of, path)),
      constants(of, program.constants.size()) {
  Copy(context, constants.get(), program.constants.data(), program.constants.size(),
       nullptr);
  if (context.is_cuda()) {
    const CudaScope scope(context.device.ordinal);
    CudaSynchronize(nullptr);
  }
  for (const Step& step : program.steps) {
    try {
      actions.push_back(MakeAction(context, program, step));
    } catch (const Failure& failure) {
      throw Failure(failure.status,
                    path + ", the step of " + step.source + ": " + failure.what());
    }
  }
  for (size_t i = 0; i < actions.size(); ++i) {
    const std::string_view call = program.steps[i].Call();
    if (!call.empty()) context.kernels.Add(std::string(call), actions[i]);
  }
  std::string().swap(program.constants);  // assigning would keep its memory
  program.files.clear();
}

tracea_graph::~tracea_graph() {
  for (const auto& action : actions) context.kernels.Remove(action.get());
}

void tracea_graph::Run(const tracea_tensor* inputs, size_t num_inputs,
                       const tracea_tensor* outputs, size_t num_outputs, void* workspace,
                       size_t workspace_bytes, void* stream) const {
  Addresses addresses;
  addresses.inputs = Checked(context, "input", program.inputs, inputs, num_inputs);
  addresses.outputs = Checked(context, "output", program.outputs, outputs, num_outputs);
  addresses.constants = static_cast<char*>(constants.get());
  addresses.workspace = static_cast<char*>(workspace);
  const auto wanted = static_cast<size_t>(program.workspace_bytes);
  if (workspace_bytes < wanted || (wanted > 0 && !workspace)) {
    Fail(TRACEA_INVALID, "got ", workspace ? workspace_bytes : 0,
         " bytes of workspace; the graph needs ", wanted, ".");
  }
  const uintptr_t alignment = context.is_cuda() ? 256 : 64;
  if (wanted > 0 && reinterpret_cast<uintptr_t>(workspace) % alignment != 0) {
    Fail(TRACEA_INVALID, "the workspace is not aligned to ", alignment, " bytes.");
  }
  const XlaArithmetic arithmetic;
  std::optional<CudaScope> scope;
  if (context.is_cuda()) scope.emplace(context.device.ordinal);
  for (const auto& action : actions) action->Run(addresses, stream);
}
