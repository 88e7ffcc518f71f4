// XLA FFI handler of functions of each element of one or two arrays:
//
//   out[i] = f(x[i], y[i])   or   f(x[i])
//
// Operands: x, and y if the function has two; f32, f64, complex64 or complex128, both of
// one type. The one that `scalar` names is a single number, the others have out's size.
// Result: out, complex where the operands are, except for lengths ("abs").
//
// The handler is stateless. It runs on XLA's thread pool and on the calling thread.

#include "cpu_elementwise.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "cpu_call.h"
#include "elementwise/elementwise.h"
#include "xla/ffi/api/ffi.h"

namespace tracea {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kAbi = 2;  // of the attributes

struct Options {
  std::string_view function;
  cpu::ScalarSide scalar;
  cpu::Isa isa;
  int64_t tasks;     // of each thread
  bool past_caches;  // whether results are written past the caches
};

cpu::ScalarSide ScalarAttribute(const ffi::Dictionary& attrs) {
  const auto name = Attribute<std::string_view>(attrs, "scalar");
  if (name == "none") return cpu::ScalarSide::kNone;
  if (name == "left") return cpu::ScalarSide::kLeft;
  if (name == "right") return cpu::ScalarSide::kRight;
  Refuse("scalar is '", name, "'; it must be one of none, left, right.");
}

Options ParseOptions(const ffi::Dictionary& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.function = Attribute<std::string_view>(attrs, "function");
  options.scalar = ScalarAttribute(attrs);
  options.isa = IsaAttribute(attrs);
  options.tasks = Attribute<int64_t>(attrs, "tasks");
  options.past_caches = Attribute<bool>(attrs, "past_caches");
  if (options.tasks < 1) Refuse("tasks=", options.tasks, " must be at least 1.");
  return options;
}

cpu::ElementType ElementTypeOf(const char* name, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return cpu::ElementType::kF32;
    case ffi::DataType::F64:
      return cpu::ElementType::kF64;
    case ffi::DataType::C64:
      return cpu::ElementType::kC64;
    case ffi::DataType::C128:
      return cpu::ElementType::kC128;
    default:
      Refuse(name, " has element type ", buffer.element_type(),
             "; it must be one of F32, F64, C64, C128.");
  }
}

void CheckOperand(const char* name, const ffi::AnyBuffer& operand,
                  const ffi::AnyBuffer& out, bool is_scalar) {
  const auto size = static_cast<int64_t>(operand.element_count());
  const int64_t wanted = is_scalar ? 1 : static_cast<int64_t>(out.element_count());
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

Call ParseCall(const Options& options, const ffi::RemainingArgs& args,
               const ffi::RemainingRets& rets) {
  if (args.size() < 1 || args.size() > 2 || rets.size() != 1) {
    Refuse("got ", args.size(), " operands and ", rets.size(),
           " results; it takes one or two operands and one result.");
  }
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer out = **rets.get<ffi::AnyBuffer>(0);
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
  call.x = x.untyped_data();
  if (args.size() == 2) {
    const ffi::AnyBuffer y = *args.get<ffi::AnyBuffer>(1);
    if (y.element_type() != x.element_type()) {
      Refuse("x has element type ", x.element_type(), " and y has ", y.element_type(),
             "; they must be equal.");
    }
    CheckOperand("y", y, out, options.scalar == cpu::ScalarSide::kRight);
    call.y = y.untyped_data();
  }
  if (ElementTypeOf("out", out) != call.function.out) {
    Refuse("out has element type ", out.element_type(), "; ", options.function, " of ",
           x.element_type(), " has another.");
  }
  call.out = out.untyped_data();
  call.size = static_cast<int64_t>(out.element_count());
  call.bytes = call.size * cpu::ElementBytes(call.function.out);
  return call;
}

ffi::Error CpuElementwise(ffi::ThreadPool pool, ffi::Dictionary attrs,
                          ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Guarded("tracea_cpu_elementwise_v1", [&] {
    const Options options = ParseOptions(attrs);
    const Call call = ParseCall(options, args, rets);
    const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
    const cpu::ElementwisePlan plan =
        cpu::PlanElementwise(call.size, call.bytes, options.tasks, threads);
    cpu::AdviseHugePages(call.out, call.bytes);
    return RunTasks(pool, plan.num_tasks(), 64, [&](int64_t task, float*) {
      cpu::Compute(call.function, call.x, call.y, call.out, plan.begin(task),
                   plan.end(task), options.past_caches);
    });
  });
}

}  // namespace
}  // namespace tracea

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cpu_elementwise_v1, tracea::CpuElementwise,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
