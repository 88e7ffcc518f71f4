// The steps of a program as actions: calls of CPU kernels, launches, clearing, copying.

#include <array>
#include <cstring>
#include <utility>

#include "calls/attention_call.h"
#include "calls/conv2d_call.h"
#include "calls/elementwise_call.h"
#include "calls/gemm_call.h"
#include "cuda.h"
#include "failure.h"
#include "graph.h"
#include "pointwise.h"
#include "sha256.h"

namespace tracea::capi {
namespace {

constexpr size_t kMostArrays = 64;
constexpr size_t kMostDims = 64;  // of a strided copy, which nests a call for each

// ---- CPU ----------------------------------------------------------------------------

class JsonAttributes final : public Attributes {
 public:
  explicit JsonAttributes(const Json& json) : all_(json.AsObject("the attributes")) {}

  bool Find(std::string_view name, bool* value) const override { return Get(name, value); }
  bool Find(std::string_view name, int64_t* value) const override {
    return Get(name, value);
  }
  bool Find(std::string_view name, double* value) const override {
    return Get(name, value);
  }
  bool Find(std::string_view name, std::string_view* value) const override {
    return Get(name, value);
  }

 private:
  template <typename T>
  bool Get(std::string_view name, T* value) const {
    const auto found = all_.find(name);
    return found != all_.end() && found->second.Get(value);
  }

  const Json::Object& all_;
};

// The arrays of a step, whose addresses are those of a run.
struct StepArrays {
  StepArrays(const Program& program, const std::vector<size_t>& ids) {
    for (size_t id : ids) values.push_back(&program.values[id]);
    if (ids.size() > kMostArrays) Fail(TRACEA_INVALID, "it has ", ids.size(), " arrays");
  }

  Arrays At(const Addresses& addresses, std::array<Array, kMostArrays>* room) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const Value& value = *values[i];
      (*room)[i] = {addresses.of(value), value.type,
                    {value.shape.data(), value.shape.size()}};
    }
    return {room->data(), values.size()};
  }

  std::vector<const Value*> values;
};

template <typename Options>
using RunFunction = void (*)(Pool&, const Options&, Arrays, Arrays);

// A call of one operation. Options point into the step's attributes, which live as long as
// the program.
template <typename Options>
class CpuCall final : public Action {
 public:
  CpuCall(Pool& pool, const Program& program, const Step& step, Options options,
          RunFunction<Options> run)
      : pool_(pool),
        reads_(program, step.reads),
        writes_(program, step.writes),
        options_(options),
        run_(run) {}

  void Run(const Addresses& addresses, void*) const override {
    std::array<Array, kMostArrays> reads, writes;
    run_(pool_, options_, reads_.At(addresses, &reads), writes_.At(addresses, &writes));
  }

 private:
  Pool& pool_;
  StepArrays reads_, writes_;
  Options options_;
  RunFunction<Options> run_;
};

template <typename Options>
std::unique_ptr<Action> MakeCall(const tracea_context& context, const Program& program,
                                 const Step& step, Options (*parse)(const Attributes&),
                                 RunFunction<Options> run) {
  const JsonAttributes attributes(step.json["attributes"]);
  return std::make_unique<CpuCall<Options>>(*context.threads, program, step,
                                            parse(attributes), run);
}

std::unique_ptr<Action> MakeCpuCall(const tracea_context& context, const Program& program,
                                    const Step& step) {
  const std::string& target = step.json["target"].AsText("a target");
  try {
    if (target == "tracea_cpu_gemm_v1") {
      return MakeCall(context, program, step, ParseGemm, RunGemm);
    }
    if (target == "tracea_cpu_conv2d_v1") {
      return MakeCall(context, program, step, ParseConv, RunConv);
    }
    if (target == "tracea_cpu_attention_v1") {
      return MakeCall(context, program, step, ParseAttention, RunAttention);
    }
    if (target == "tracea_cpu_elementwise_v1") {
      return MakeCall(context, program, step, ParseElementwise, RunElementwise);
    }
  } catch (const InvalidCall& error) {
    Fail(TRACEA_INVALID, error.what());
  }
  Fail(TRACEA_UNSUPPORTED, "this library has no ", target, "; it is of version ",
       tracea_version(), ".");
}

// A strided copy: runs of contiguous bytes along some dimensions.
class Move final : public Action {
 public:
  Move(const Program& program, const Step& step)
      : from_(program.values[step.reads[0]]),
        to_(program.values[step.writes[0]]),
        run_(step.json["run"].AsInt("a run")),
        counts_(step.json["counts"].AsInts("the counts")),
        from_strides_(step.json["from_strides"].AsInts("the strides")),
        to_strides_(step.json["to_strides"].AsInts("the strides")),
        from_offset_(step.json["from_offset"].AsInt("an offset")),
        to_offset_(step.json["to_offset"].AsInt("an offset")) {
    CheckInside(from_strides_, from_offset_, from_.bytes());
    CheckInside(to_strides_, to_offset_, to_.bytes());
    int64_t bytes = run_;  // which are written once
    for (int64_t count : counts_) {
      if (count > to_.bytes() / bytes) Fail(TRACEA_INVALID, "it copies more than there is");
      bytes *= count;
    }
  }

  void Run(const Addresses& addresses, void*) const override {
    Dimension(0, static_cast<char*>(addresses.of(to_)) + to_offset_,
              static_cast<const char*>(addresses.of(from_)) + from_offset_);
  }

 private:
  void CheckInside(const std::vector<int64_t>& strides, int64_t offset,
                   int64_t bytes) const {
    if (strides.size() != counts_.size() || counts_.size() > kMostDims || run_ < 1) {
      Fail(TRACEA_INVALID, "it copies what it cannot");
    }
    const bool fits = 0 <= offset && offset <= bytes && run_ <= bytes - offset;
    int64_t left = fits ? bytes - offset - run_ : -1;  // behind the last run
    for (size_t i = 0; i < counts_.size(); ++i) {
      const int64_t steps = counts_[i] - 1, stride = strides[i];
      if (steps < 0 || stride < 0 || (steps > 0 && stride > bytes / steps)) left = -1;
      if (left >= 0) left -= steps * stride;
    }
    if (left < 0) Fail(TRACEA_INVALID, "it copies more than there is");
  }

  void Dimension(size_t i, char* to, const char* from) const {
    if (i == counts_.size()) {
      std::memcpy(to, from, static_cast<size_t>(run_));
      return;
    }
    for (int64_t n = 0; n < counts_[i]; ++n) {
      Dimension(i + 1, to + n * to_strides_[i], from + n * from_strides_[i]);
    }
  }

  const Value& from_;
  const Value& to_;
  int64_t run_;
  std::vector<int64_t> counts_, from_strides_, to_strides_;
  int64_t from_offset_, to_offset_;
};

// ---- CUDA ---------------------------------------------------------------------------

CudaLaunch LaunchOf(const Program& program, const Step& step) {
  const Json& json = step.json;
  CudaLaunch launch;
  launch.key = json["key"].AsText("a key");
  launch.entry = json["entry"].AsText("an entry");
  launch.arch = json["arch"].AsText("an architecture");
  launch.launch = json["launch"].AsInts("a launch");
  launch.params = json["params"].AsInts("the parameters");
  const std::string& image = json["image"].AsText("an image");
  const auto file = program.files.find(image);
  if (file == program.files.end()) Fail(TRACEA_INVALID, "the bundle has no ", image, ".");
  launch.image = file->second;
  launch.sha256 = Sha256(launch.image);
  return launch;
}

class Launch final : public Action {
 public:
  Launch(const tracea_context& context, const Program& program, const Step& step)
      : ordinal_(context.device.ordinal),
        kernel_(LaunchOf(program, step), CudaScope(ordinal_)) {
    for (const auto* ids : {&step.reads, &step.writes}) {
      for (size_t id : *ids) values_.push_back(&program.values[id]);
    }
    if (values_.size() > kMostArrays || kernel_.num_operands() > values_.size()) {
      Fail(TRACEA_INVALID, "its kernel has ", kernel_.num_operands(),
           " operands and the step ", values_.size(), " arrays.");
    }
  }

  void Run(const Addresses& addresses, void* stream) const override {
    std::array<void*, kMostArrays> operands;
    for (size_t i = 0; i < values_.size(); ++i) operands[i] = addresses.of(*values_[i]);
    RunAt(operands.data(), values_.size(), stream);
  }

  void RunAt(void* const* arrays, size_t count, void* stream) const override {
    kernel_.Launch(CudaScope(ordinal_), arrays, count, stream);
  }

 private:
  int ordinal_;
  CudaKernel kernel_;
  std::vector<const Value*> values_;
};

// ---- both ---------------------------------------------------------------------------

class Zero final : public Action {
 public:
  Zero(const tracea_context& context, const Value& value)
      : context_(context), value_(value) {}

  void Run(const Addresses& addresses, void* stream) const override {
    const auto bytes = static_cast<size_t>(value_.bytes());
    if (context_.is_cuda()) {
      CudaZero(addresses.of(value_), bytes, stream);
    } else if (bytes > 0) {
      std::memset(addresses.of(value_), 0, bytes);
    }
  }

 private:
  const tracea_context& context_;
  const Value& value_;
};

class CopyAction final : public Action {
 public:
  CopyAction(const tracea_context& context, const Value& from, const Value& to)
      : context_(context), from_(from), to_(to) {}

  void Run(const Addresses& addresses, void* stream) const override {
    Copy(context_, addresses.of(to_), addresses.of(from_),
         static_cast<size_t>(from_.bytes()), stream);
  }

 private:
  const tracea_context& context_;
  const Value& from_;
  const Value& to_;
};

}  // namespace

void Action::RunAt(void* const*, size_t, void*) const {
  Fail(TRACEA_UNSUPPORTED, "It is no kernel that can be called by itself.");
}

std::unique_ptr<Action> MakeAction(const tracea_context& context, const Program& program,
                                   const Step& step) {
  const auto value = [&](size_t id) -> const Value& { return program.values[id]; };
  switch (step.kind) {
    case StepKind::kCpuCall:
      return MakeCpuCall(context, program, step);
    case StepKind::kMap:
      return MakeMap(*context.threads, program, step);
    case StepKind::kReduce:
      return MakeReduce(*context.threads, program, step);
    case StepKind::kLaunch:
      return std::make_unique<Launch>(context, program, step);
    case StepKind::kZero:
      return std::make_unique<Zero>(context, value(step.writes[0]));
    case StepKind::kMove:
      return std::make_unique<Move>(program, step);
    case StepKind::kCopy:
      break;
  }
  return std::make_unique<CopyAction>(context, value(step.reads[0]), value(step.writes[0]));
}

}  // namespace tracea::capi
