// Calls of functions of each element of one or two arrays:
//
//   out[i] = f(x[i], y[i])   or   f(x[i])
//
// Operands: x, and y if the function has two; f32, f64, complex64 or complex128, both of
// one type. The one that `scalar` names is a single number, the others have out's size.
// Result: out, complex where the operands are, except for lengths ("abs").

#include "calls/elementwise_call.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "elementwise/elementwise.h"

namespace tracea {
namespace {

using Options = ElementwiseOptions;

constexpr int64_t kAbi = 2;  // of the attributes

cpu::ScalarSide ScalarAttribute(const Attributes& attrs) {
  const auto name = Attribute<std::string_view>(attrs, "scalar");
  if (name == "none") return cpu::ScalarSide::kNone;
  if (name == "left") return cpu::ScalarSide::kLeft;
  if (name == "right") return cpu::ScalarSide::kRight;
  Refuse("scalar is '", name, "'; it must be one of none, left, right.");
}

}  // namespace

ElementwiseOptions ParseElementwise(const Attributes& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.function = Attribute<std::string_view>(attrs, "function");
  options.scalar = ScalarAttribute(attrs);
  options.isa = IsaAttribute(attrs);
  options.tasks = SizeAttribute(attrs, "tasks", 1);
  options.past_caches = Attribute<bool>(attrs, "past_caches");
  return options;
}

namespace {

cpu::ElementType ElementTypeOf(const char* name, const Array& buffer) {
  switch (buffer.type) {
    case ArrayType::kF32:
      return cpu::ElementType::kF32;
    case ArrayType::kF64:
      return cpu::ElementType::kF64;
    case ArrayType::kC64:
      return cpu::ElementType::kC64;
    case ArrayType::kC128:
      return cpu::ElementType::kC128;
    default:
      Refuse(name, " has element type ", buffer.type,
             "; it must be one of F32, F64, C64, C128.");
  }
}

void CheckOperand(const char* name, const Array& operand,
                  const Array& out, bool is_scalar) {
  const auto size = static_cast<int64_t>(operand.size());
  const int64_t wanted = is_scalar ? 1 : static_cast<int64_t>(out.size());
  if (size != wanted) {
    Refuse(name, " has shape ", ShapeText(operand), " and out ", ShapeText(out), "; ",
           name, " must have ", wanted, " elements.");
  }
}

// The whole call, validated.
struct Call {
  cpu::Elementwise function;
  const void* x;
  const void* y;
  void* out;
  int64_t size, bytes;
};

Call ParseCall(const Options& options, const Arrays& args,
               const Arrays& rets) {
  if (args.size() < 1 || args.size() > 2 || rets.size() != 1) {
    Refuse("got ", args.size(), " operands and ", rets.size(),
           " results; it takes one or two operands and one result.");
  }
  const Array& x = args[0];
  const Array& out = rets[0];
  const cpu::ElementType type = ElementTypeOf("x", x);
  Call call{};
  if (!cpu::UsableElementwiseIsa(options.isa)
           .find(options.function.data(), static_cast<int64_t>(options.function.size()),
                 type, options.scalar, &call.function)) {
    Refuse("function is '", options.function, "'; there is none of this name",
           options.scalar == cpu::ScalarSide::kNone ? "." : " with two operands.");
  }
  if (static_cast<size_t>(call.function.operands) != args.size()) {
    Refuse(options.function, " takes ", call.function.operands, " operands; got ",
           args.size(), ".");
  }
  CheckOperand("x", x, out, options.scalar == cpu::ScalarSide::kLeft);
  call.x = x.data;
  if (args.size() == 2) {
    const Array& y = args[1];
    if (y.type != x.type) {
      Refuse("x has element type ", x.type, " and y has ", y.type,
             "; they must be equal.");
    }
    CheckOperand("y", y, out, options.scalar == cpu::ScalarSide::kRight);
    call.y = y.data;
  }
  if (ElementTypeOf("out", out) != call.function.out) {
    Refuse("out has element type ", out.type, "; ", options.function, " of ",
           x.type, " has another.");
  }
  call.out = out.data;
  call.size = static_cast<int64_t>(out.size());
  call.bytes = call.size * cpu::ElementBytes(call.function.out);
  return call;
}

}  // namespace

void RunElementwise(Pool& pool, const ElementwiseOptions& options, Arrays operands,
                    Arrays results) {
  const Call call = ParseCall(options, operands, results);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const cpu::ElementwisePlan plan =
      cpu::PlanElementwise(call.out, call.size, call.bytes, options.tasks, threads);
  cpu::AdviseHugePages(call.out, call.bytes);
  RunTasks(pool, plan.num_tasks(), 64, [&](int64_t task, float*) {
    cpu::Compute(call.function, call.x, call.y, call.out, plan.begin(task),
                 plan.end(task), options.past_caches);
  });
}

}  // namespace tracea
