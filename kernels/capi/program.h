// What a bundle says: arrays, where they lie, and the steps that compute them.

#ifndef TRACEA_KERNELS_CAPI_PROGRAM_H_
#define TRACEA_KERNELS_CAPI_PROGRAM_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "calls/call.h"
#include "json.h"
#include "tracea.h"

namespace tracea::capi {

// Names of dtypes, in the order of ArrayType and of tracea_dtype.
inline constexpr const char* kDtypes[] = {"float32",   "bfloat16",   "float16", "float64",
                                          "complex64", "complex128", "bool",    "int32"};

inline constexpr int64_t kFormat = 1;  // version of the manifest

enum class Storage { kInput, kOutput, kConstants, kWorkspace };

// An array: some bytes of an input, an output, the constants or the workspace.
struct Value {
  Storage storage;
  size_t index;    // of the input or the output
  int64_t offset;  // in bytes
  ArrayType type;
  std::vector<int64_t> shape;

  int64_t bytes() const;
};

struct Named {
  std::string name;
  Value value;
};

enum class StepKind { kCpuCall, kMap, kReduce, kLaunch, kZero, kCopy, kMove };

struct Step {
  StepKind kind;
  Json json;  // the step's own fields
  std::vector<size_t> reads, writes;
  std::string source;  // the line of the program that it was traced from

  // What `tracea_matmul` and its like find the step's kernel by; empty if they do not.
  std::string_view Call() const;
};

struct Program {
  tracea_platform platform;
  std::string arch;
  int64_t workspace_bytes;
  std::string constants;
  std::vector<Named> inputs, outputs;
  std::vector<Value> values;
  std::vector<Step> steps;
  std::map<std::string, std::string> files;  // but for the constants
};

// Reads and checks a bundle: every array lies in what holds it, and every step names
// arrays that there are.
//
// Throws Failure as `ReadBundle`, TRACEA_INVALID where the manifest is wrong, and
// TRACEA_UNSUPPORTED where a later version wrote it.
Program ReadProgram(const std::string& path);

}  // namespace tracea::capi

#endif  // TRACEA_KERNELS_CAPI_PROGRAM_H_
