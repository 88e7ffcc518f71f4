// A program on a device, ready to run.

#ifndef TRACEA_KERNELS_CAPI_GRAPH_H_
#define TRACEA_KERNELS_CAPI_GRAPH_H_

#include <memory>
#include <string>
#include <vector>

#include "calls/call.h"
#include "context.h"
#include "program.h"

namespace tracea::capi {

// The device address of each array of a program, in one run.
struct Addresses {
  std::vector<void*> inputs, outputs;
  char* constants;
  char* workspace;

  void* of(const Value& value) const;
};

// A step, made once, run often and by several threads at a time.
class Action {
 public:
  virtual ~Action() = default;
  virtual void Run(const Addresses& addresses, void* stream) const = 0;
  // With arrays of a caller's: only kernels that `Call` names can.
  virtual void RunAt(void* const* arrays, size_t count, void* stream) const;
};

// What a bundle's step stands for on the context's device. Throws Failure.
std::unique_ptr<Action> MakeAction(const tracea_context& context, const Program& program,
                                   const Step& step);

// Memory of a context's device, with the context's lifetime at most.
class DeviceMemory {
 public:
  DeviceMemory(const tracea_context& context, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* get() const { return memory_; }
  void* release();

  // Frees what `release` returned.
  static void Free(const tracea_context& context, void* memory);

 private:
  const tracea_context& context_;
  void* memory_ = nullptr;
};

void Copy(const tracea_context& context, void* to, const void* from, size_t bytes,
          void* stream);

}  // namespace tracea::capi

struct tracea_graph {
  tracea_graph(const tracea_context& context, const std::string& path);
  ~tracea_graph();

  void Run(const tracea_tensor* inputs, size_t num_inputs, const tracea_tensor* outputs,
           size_t num_outputs, void* workspace, size_t workspace_bytes,
           void* stream) const;

  const tracea_context& context;
  tracea::capi::Program program;
  tracea::capi::DeviceMemory constants;
  std::vector<std::shared_ptr<const tracea::capi::Action>> actions;
};

#endif  // TRACEA_KERNELS_CAPI_GRAPH_H_
