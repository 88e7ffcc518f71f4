// Calls of CPU convolutions and their gradients:
//
//   z = conv(x, w) + bias + residual;   y = activation(z)
//
// Arrays, contiguous; f32, bf16 or f16:
//   x  (batch, height, width, channels)
//   w  (kernel height, kernel width, channels / groups, columns)
//   y  (batch, out height, out width, columns)
// Operands, in this order:
//   lhs, rhs  x, w if direction="forward"; dy, w if "input_grad"; x, dy if "weight_grad";
//             of one dtype
//   bias      (columns,), if bias
//   residual  y's shape, if residual
// Results:
//   out            y, dx or dw
//   preactivation  z, of y's shape and dtype, if save_preactivation
// Only a forward convolution has bias, residual, activation and preactivation. padding_*
// is what lies before the first row and column; what follows the last ones is known from
// the shapes.

#include "calls/conv2d_call.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/isa.h"
#include "common/memory.h"
#include "conv2d/conv2d.h"

namespace tracea {
namespace {

using Options = ConvOptions;

constexpr int64_t kAbi = 1;  // of the attributes

cpu::ConvDirection ParseDirection(std::string_view name) {
  if (name == "forward") return cpu::ConvDirection::kForward;
  if (name == "input_grad") return cpu::ConvDirection::kInputGrad;
  if (name == "weight_grad") return cpu::ConvDirection::kWeightGrad;
  Refuse("direction is '", name,
         "'; it must be one of forward, input_grad, weight_grad.");
}

cpu::ConvExtent ParseExtent(const Attributes& attrs, const std::string& axis) {
  cpu::ConvExtent extent{};
  extent.stride = SizeAttribute(attrs, "stride_" + axis, 1);
  extent.dilation = SizeAttribute(attrs, "dilation_" + axis, 1);
  extent.padding = SizeAttribute(attrs, "padding_" + axis, 1 - kMostSize);
  return extent;
}

}  // namespace

ConvOptions ParseConv(const Attributes& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.direction = ParseDirection(Attribute<std::string_view>(attrs, "direction"));
  options.height = ParseExtent(attrs, "height");
  options.width = ParseExtent(attrs, "width");
  options.groups = SizeAttribute(attrs, "groups", 1);
  options.activation = ActivationAttribute(attrs);
  options.has_bias = Attribute<bool>(attrs, "bias");
  options.has_residual = Attribute<bool>(attrs, "residual");
  options.save_preactivation = Attribute<bool>(attrs, "save_preactivation");
  const bool plain = !options.has_bias && !options.has_residual &&
                     !options.save_preactivation &&
                     options.activation == cpu::Activation::kNone;
  if (options.direction != cpu::ConvDirection::kForward && !plain) {
    Refuse("a gradient has neither bias, residual, activation nor preactivation.");
  }
  options.isa = cpu::UsableConvIsa(IsaAttribute(attrs));
  options.config.kc = SizeAttribute(attrs, "kc", 0);
  options.config.nc = SizeAttribute(attrs, "nc", 0);
  options.config.tasks = SizeAttribute(attrs, "tasks", 0);
  return options;
}

namespace {

struct Named {
  const char* name;
  Array buffer;

  int64_t dim(int i) const { return buffer.dims[i]; }
};

void CheckCounts(const Options& options, size_t operands, size_t results) {
  const size_t want_operands = 2 + options.has_bias + options.has_residual;
  const size_t want_results = 1 + options.save_preactivation;
  if (operands != want_operands || results != want_results) {
    Refuse("got ", operands, " operands and ", results, " results; with bias=",
           options.has_bias, ", residual=", options.has_residual,
           ", save_preactivation=", options.save_preactivation, " it takes ",
           want_operands, " operands and ", want_results, " results.");
  }
}

template <typename... Sizes>
void CheckShape(const Named& array, Sizes... sizes) {
  const int64_t want[] = {sizes...};
  const auto dims = array.buffer.dims;
  if (dims.size() == sizeof...(sizes) && std::equal(dims.begin(), dims.end(), want)) {
    return;
  }
  std::string text;
  for (int64_t size : want) text += (text.empty() ? "" : ", ") + std::to_string(size);
  Refuse(array.name, " has shape ", ShapeText(array.buffer),
         "; the other arrays ask for (", text, ").");
}

// Sizes of x, w and y, which must agree.
void ParseShapes(const Options& options, const Named& x, const Named& w, const Named& y,
                 cpu::ConvArgs* args) {
  for (const Named& array : {x, w, y}) {
    if (array.buffer.dims.size() != 4) {
      Refuse(array.name, " has shape ", ShapeText(array.buffer),
             "; its rank must be 4.");
    }
  }
  args->batch = x.dim(0);
  args->channels = x.dim(3);
  args->columns = y.dim(3);
  args->groups = options.groups;
  args->height = options.height;
  args->width = options.width;
  cpu::ConvExtent* const extents[] = {&args->height, &args->width};
  for (int axis = 0; axis < 2; ++axis) {
    extents[axis]->x = x.dim(1 + axis);
    extents[axis]->w = w.dim(axis);
    extents[axis]->y = y.dim(1 + axis);
  }
  if (args->channels % args->groups != 0 || args->columns % args->groups != 0) {
    Refuse("groups=", args->groups, " must divide the ", args->channels,
           " channels of x and the ", args->columns, " of y.");
  }
  CheckShape(w, w.dim(0), w.dim(1), args->channels / args->groups, args->columns);
  CheckShape(y, args->batch, y.dim(1), y.dim(2), args->columns);
}

cpu::ConvArgs ParseCall(const Options& options, const Arrays& operands,
                        const Arrays& results) {
  CheckCounts(options, operands.size(), results.size());
  cpu::ConvArgs args{};
  args.direction = options.direction;
  args.activation = options.activation;
  const bool is_forward = options.direction == cpu::ConvDirection::kForward;
  const Named lhs{is_forward ? "x" : "lhs", operands[0]};
  const Named rhs{is_forward ? "w" : "rhs", operands[1]};
  const Named out{"out", results[0]};
  switch (options.direction) {
    case cpu::ConvDirection::kForward:
      ParseShapes(options, lhs, rhs, out, &args);
      break;
    case cpu::ConvDirection::kInputGrad:
      ParseShapes(options, out, rhs, lhs, &args);
      break;
    case cpu::ConvDirection::kWeightGrad:
      ParseShapes(options, lhs, out, rhs, &args);
      break;
  }
  args.lhs = lhs.buffer.data;
  args.rhs = rhs.buffer.data;
  args.out = out.buffer.data;
  args.in_type = DTypeOf(lhs.name, lhs.buffer);
  args.out_type = DTypeOf("out", out.buffer);
  if (args.in_type != DTypeOf(rhs.name, rhs.buffer)) {
    Refuse(lhs.name, " has element type ", lhs.buffer.type, " and ", rhs.name, " has ",
           rhs.buffer.type, "; they must be equal.");
  }
  size_t next = 2;
  if (options.has_bias) {
    const Named bias{"bias", operands[next++]};
    CheckShape(bias, args.columns);
    args.bias = bias.buffer.data;
    args.bias_type = DTypeOf("bias", bias.buffer);
  }
  if (options.has_residual) {
    const Named residual{"residual", operands[next++]};
    CheckShape(residual, args.batch, args.height.y, args.width.y, args.columns);
    args.residual = residual.buffer.data;
    args.residual_type = DTypeOf("residual", residual.buffer);
  }
  if (options.save_preactivation) {
    const Named z{"preactivation", results[1]};
    CheckShape(z, args.batch, args.height.y, args.width.y, args.columns);
    args.preactivation = z.buffer.data;
    if (DTypeOf("preactivation", z.buffer) != args.out_type) {
      Refuse("preactivation has element type ", z.buffer.type,
             " and out has ", out.buffer.type, "; they must be equal.");
    }
  }
  return args;
}

void RunCall(Pool& pool, const Options& options,
                   const cpu::ConvArgs& args, int64_t out_bytes) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const cpu::ConvPlan plan = cpu::PlanConv(*options.isa, args, options.config, threads);
  if (plan.num_tasks() == 0) return;
  cpu::AdviseHugePages(args.out, out_bytes);
  if (args.preactivation) cpu::AdviseHugePages(args.preactivation, out_bytes);
  RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    cpu::RunConvTask(plan, args, task, workspace);
                  });
}

}  // namespace

void RunConv(Pool& pool, const ConvOptions& options, Arrays operands, Arrays results) {
  const cpu::ConvArgs call = ParseCall(options, operands, results);
  RunCall(pool, options, call, results[0].bytes());
}

}  // namespace tracea
