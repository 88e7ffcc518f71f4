#include "program.h"

#include <iterator>
#include <utility>

#include "failure.h"
#include "files.h"

namespace tracea::capi {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 48;

ArrayType ParseType(const std::string& name) {
  for (size_t i = 0; i < std::size(kDtypes); ++i) {
    if (name == kDtypes[i]) return static_cast<ArrayType>(i);
  }
  Fail(TRACEA_INVALID, "there is no dtype '", name, "'");
}

std::vector<int64_t> ParseShape(const Json& json) {
  std::vector<int64_t> shape = json.AsInts("a shape");
  int64_t elements = 1;  // of empty arrays too: kernels multiply some of the sizes
  for (int64_t dim : shape) {
    if (dim < 0 || (dim > 0 && elements > kMostElements / dim)) {
      Fail(TRACEA_INVALID, "an array has the shape ", ShapeText(shape));
    }
    elements *= dim > 0 ? dim : 1;
  }
  if (shape.size() > TRACEA_MAX_RANK) {
    Fail(TRACEA_INVALID, "an array has ", shape.size(), " dimensions");
  }
  return shape;
}

Value ParseArray(const Json& json) {
  Value value{};
  value.type = ParseType(json["dtype"].AsText("a dtype"));
  value.shape = ParseShape(json["shape"]);
  return value;
}

std::vector<Named> ParseNamed(const Json& json, Storage storage) {
  std::vector<Named> all;
  for (const Json& item : json.AsList("the inputs or outputs")) {
    Named named{item["name"].AsText("a name"), ParseArray(item)};
    named.value.storage = storage;
    named.value.index = all.size();
    all.push_back(std::move(named));
  }
  return all;
}

Storage ParseStorage(const std::string& name) {
  if (name == "input") return Storage::kInput;
  if (name == "output") return Storage::kOutput;
  if (name == "constants") return Storage::kConstants;
  if (name == "workspace") return Storage::kWorkspace;
  Fail(TRACEA_INVALID, "there is no storage '", name, "'");
}

// Bytes of what holds the array.
int64_t Room(const Program& program, const Value& value) {
  switch (value.storage) {
    case Storage::kConstants:
      return static_cast<int64_t>(program.constants.size());
    case Storage::kWorkspace:
      return program.workspace_bytes;
    case Storage::kInput:
    case Storage::kOutput:
      break;
  }
  const auto& all = value.storage == Storage::kInput ? program.inputs : program.outputs;
  if (value.index >= all.size()) {
    Fail(TRACEA_INVALID, "an array is in input or output ", value.index, " of ",
         all.size());
  }
  return all[value.index].value.bytes();
}

Value ParseValue(const Program& program, const Json& json) {
  Value value = ParseArray(json);
  value.storage = ParseStorage(json["storage"].AsText("a storage"));
  value.index = static_cast<size_t>(json["index"].AsInt("an index"));
  value.offset = json["offset"].AsInt("an offset");
  const int64_t room = Room(program, value);
  if (value.offset < 0 || value.offset > room || value.bytes() > room - value.offset ||
      value.offset % 16 != 0) {
    Fail(TRACEA_INVALID, "an array of ", value.bytes(), " bytes at byte ", value.offset,
         " does not lie in the ", room, " bytes that should hold it");
  }
  return value;
}

StepKind ParseKind(const std::string& name, tracea_platform platform) {
  if (name == "cpu" && platform == TRACEA_CPU) return StepKind::kCpuCall;
  if (name == "map" && platform == TRACEA_CPU) return StepKind::kMap;
  if (name == "reduce" && platform == TRACEA_CPU) return StepKind::kReduce;
  if (name == "move" && platform == TRACEA_CPU) return StepKind::kMove;
  if (name == "cuda" && platform == TRACEA_CUDA) return StepKind::kLaunch;
  if (name == "zero") return StepKind::kZero;
  if (name == "copy") return StepKind::kCopy;
  Fail(TRACEA_INVALID, "there is no kind '", name, "' of steps");
}

bool Overlap(const Value& x, const Value& y) {
  if (x.storage != y.storage) return false;
  if (x.storage != Storage::kWorkspace) return x.index == y.index;
  return x.offset < y.offset + y.bytes() && y.offset < x.offset + x.bytes();
}

std::vector<size_t> ParseIds(const Json& json, const Program& program) {
  std::vector<size_t> ids;
  for (int64_t id : json.AsInts("the arrays of a step")) {
    if (id < 0 || static_cast<size_t>(id) >= program.values.size()) {
      Fail(TRACEA_INVALID, "a step names array ", id, " of ", program.values.size());
    }
    ids.push_back(static_cast<size_t>(id));
  }
  return ids;
}

Step ParseStep(const Program& program, const Json& json) {
  Step step{};
  step.kind = ParseKind(json["kind"].AsText("a step's kind"), program.platform);
  step.reads = ParseIds(json["reads"], program);
  step.writes = ParseIds(json["writes"], program);
  step.source = json["source"].AsText("a step's source");
  step.json = json;
  if (step.writes.empty()) Fail(TRACEA_INVALID, "a step writes nothing");
  for (size_t id : step.writes) {
    const Storage storage = program.values[id].storage;
    if (storage == Storage::kInput || storage == Storage::kConstants) {
      Fail(TRACEA_INVALID, "a step writes an input or a constant");
    }
  }
  const bool is_memory = step.kind == StepKind::kZero || step.kind == StepKind::kCopy ||
                         step.kind == StepKind::kMove;
  const size_t reads = step.kind == StepKind::kZero ? 0 : 1;
  if (is_memory && (step.reads.size() != reads || step.writes.size() != 1)) {
    Fail(TRACEA_INVALID, "a step copies or clears other arrays than it can");
  }
  if (is_memory && reads == 1) {
    const Value &from = program.values[step.reads[0]], &to = program.values[step.writes[0]];
    if (Overlap(from, to)) Fail(TRACEA_INVALID, "a step copies an array to itself");
    if (step.kind == StepKind::kCopy && from.bytes() != to.bytes()) {
      Fail(TRACEA_INVALID, "a step copies an array to one of another size");
    }
  }
  return step;
}

tracea_platform ParsePlatform(const std::string& name) {
  if (name == "cpu") return TRACEA_CPU;
  if (name == "cuda") return TRACEA_CUDA;
  Fail(TRACEA_UNSUPPORTED, "it was made for the platform '", name, "'");
}

void ParseManifest(const Json& json, Program* program) {
  const int64_t version = json["version"].AsInt("the version");
  if (json["format"].AsText("the format") != "tracea-bundle") {
    Fail(TRACEA_INVALID, "its format is another one");
  }
  if (version != kFormat) {
    Fail(TRACEA_UNSUPPORTED, "it has version ", version, " of the format; this library has ",
         kFormat);
  }
  program->platform = ParsePlatform(json["platform"].AsText("the platform"));
  program->arch = json["arch"].AsText("the architecture");
  program->workspace_bytes = json["workspace_bytes"].AsInt("the bytes of workspace");
  if (program->workspace_bytes < 0) Fail(TRACEA_INVALID, "its workspace is negative");
  program->inputs = ParseNamed(json["inputs"], Storage::kInput);
  program->outputs = ParseNamed(json["outputs"], Storage::kOutput);
  for (const Json& item : json["values"].AsList("the arrays")) {
    program->values.push_back(ParseValue(*program, item));
  }
  for (const Json& item : json["steps"].AsList("the steps")) {
    program->steps.push_back(ParseStep(*program, item));
  }
}

std::string Taken(std::map<std::string, std::string>* files, const std::string& path,
                  const char* name) {
  auto node = files->extract(name);
  if (node.empty()) {
    Fail(TRACEA_INVALID, path, " is no whole bundle: it has no ", name, ".");
  }
  return std::move(node.mapped());
}

}  // namespace

int64_t Value::bytes() const {
  int64_t size = BytesOf(type);
  for (int64_t dim : shape) size *= dim;
  return size;
}

std::string_view Step::Call() const {
  std::string_view call;
  const auto& fields = json.AsObject("a step");
  const auto found = fields.find("call");
  if (kind == StepKind::kLaunch && found != fields.end()) found->second.Get(&call);
  return call;
}

Program ReadProgram(const std::string& path) {
  Program program{};
  program.files = ReadBundle(path);
  const std::string manifest = Taken(&program.files, path, "manifest.json");
  program.constants = Taken(&program.files, path, "constants.bin");
  try {
    ParseManifest(Json::Parse(manifest), &program);
  } catch (const Failure& failure) {
    Fail(failure.status, path, "/manifest.json is not understood: ", failure.what(), ".");
  }
  return program;
}

}  // namespace tracea::capi
