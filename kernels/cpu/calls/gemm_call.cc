// Calls of the CPU matrix product with a fused epilogue:
//
//   z = op(lhs) @ op(rhs) + bias;   out = activation(z) + residual, or times residual
//
// Operands, in this order; f32, bf16 or f16:
//   lhs       ([batch,] m, k), or ([batch,] k, m) if trans_lhs
//   rhs       ([batch,] k, n), or ([batch,] n, k) if trans_rhs; lhs's dtype
//   bias      (n,) if bias="row", (batch, n) if bias="batched_row"
//   residual  out's shape, if residual="add" or residual="multiply"
// Results:
//   out            ([batch,] m, n), with a batch dimension if an operand has one
//   preactivation  z, of out's shape and dtype, if save_preactivation
// An operand of rank 2 is shared by all batches.

#include "calls/gemm_call.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "gemm/gemm.h"

namespace tracea {
namespace {

using Options = GemmOptions;

constexpr int64_t kAbi = 2;  // of the attributes

void ParseResidual(std::string_view how, Options* options) {
  if (how != "none" && how != "add" && how != "multiply") {
    Refuse("residual is '", how, "'; it must be one of none, add, multiply.");
  }
  options->has_residual = how != "none";
  options->residual_op =
      how == "multiply" ? cpu::ResidualOp::kMultiply : cpu::ResidualOp::kAdd;
}

}  // namespace

GemmOptions ParseGemm(const Attributes& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.trans_lhs = Attribute<bool>(attrs, "trans_lhs");
  options.trans_rhs = Attribute<bool>(attrs, "trans_rhs");
  options.activation = ActivationAttribute(attrs);
  options.bias = Attribute<std::string_view>(attrs, "bias");
  if (options.bias != "none" && options.bias != "row" && options.bias != "batched_row") {
    Refuse("bias is '", options.bias, "'; it must be one of none, row, batched_row.");
  }
  ParseResidual(Attribute<std::string_view>(attrs, "residual"), &options);
  options.save_preactivation = Attribute<bool>(attrs, "save_preactivation");
  options.isa = IsaAttribute(attrs);
  options.config.kc = SizeAttribute(attrs, "kc", 0);  // 0 chooses the default
  options.config.nc = SizeAttribute(attrs, "nc", 0);
  options.config.tasks = SizeAttribute(attrs, "tasks", 0);
  return options;
}

namespace {

// One operand or result: ([batch,] rows, cols) as stored, contiguous.
struct Matrix {
  void* data = nullptr;
  cpu::DType type = cpu::DType::kF32;
  bool batched = false;
  int64_t batch = 1, rows = 0, cols = 0;

  int64_t item_size() const { return ItemSize(type); }
  // Bytes from one batch to the next; 0 if all share the matrix.
  int64_t batch_bytes() const { return batched ? rows * cols * item_size() : 0; }
  int64_t size_bytes() const { return batch * rows * cols * item_size(); }
};

Matrix ParseMatrix(const char* name, const Array& buffer) {
  const auto dims = buffer.dims;
  if (dims.size() != 2 && dims.size() != 3) {
    Refuse(name, " has shape ", ShapeText(buffer), "; its rank must be 2 or 3.");
  }
  Matrix matrix;
  matrix.data = buffer.data;
  matrix.type = DTypeOf(name, buffer);
  matrix.batched = dims.size() == 3;
  matrix.batch = matrix.batched ? dims[0] : 1;
  matrix.rows = dims[dims.size() - 2];
  matrix.cols = dims[dims.size() - 1];
  return matrix;
}

// The whole call, validated.
struct Call {
  Matrix lhs, rhs, bias, residual, out, preactivation;
  bool has_bias = false, has_residual = false, has_preactivation = false;
  int64_t batch = 1, m = 0, n = 0, k = 0;
};

void CheckCounts(const Options& options, size_t operands, size_t results) {
  const size_t want_operands = 2 + (options.bias != "none") + options.has_residual;
  const size_t want_results = 1 + options.save_preactivation;
  if (operands != want_operands || results != want_results) {
    Refuse("got ", operands, " operands and ", results, " results; with bias='",
           options.bias, "', residual=", options.has_residual,
           ", save_preactivation=", options.save_preactivation, " it takes ",
           want_operands, " operands and ", want_results, " results.");
  }
}

// Shape of out for the given operands.
void CheckLike(const char* name, const Array& buffer, const Call& call,
               bool batched) {
  const Matrix got = ParseMatrix(name, buffer);
  if (got.batched != batched || got.batch != call.batch || got.rows != call.m ||
      got.cols != call.n) {
    Refuse(name, " has shape ", ShapeText(buffer), "; lhs and rhs ask for (",
           batched ? std::to_string(call.batch) + ", " : "", call.m, ", ", call.n, ").");
  }
}

void ParseProduct(const Options& options, const Array& lhs,
                  const Array& rhs, Call* call) {
  call->lhs = ParseMatrix("lhs", lhs);
  call->rhs = ParseMatrix("rhs", rhs);
  if (call->lhs.type != call->rhs.type) {
    Refuse("lhs has element type ", lhs.type, " and rhs has ",
           rhs.type, "; they must be equal.");
  }
  call->m = options.trans_lhs ? call->lhs.cols : call->lhs.rows;
  call->k = options.trans_lhs ? call->lhs.rows : call->lhs.cols;
  call->n = options.trans_rhs ? call->rhs.rows : call->rhs.cols;
  const int64_t rhs_k = options.trans_rhs ? call->rhs.cols : call->rhs.rows;
  if (call->k != rhs_k) {
    Refuse("lhs of shape ", ShapeText(lhs), " contracts ", call->k,
           " elements and rhs of shape ", ShapeText(rhs), " contracts ", rhs_k,
           " (trans_lhs=", options.trans_lhs, ", trans_rhs=", options.trans_rhs,
           "); the two must be equal.");
  }
  if (call->lhs.batched && call->rhs.batched && call->lhs.batch != call->rhs.batch) {
    Refuse("lhs has ", call->lhs.batch, " batches and rhs has ", call->rhs.batch,
           "; they must be equal, or one of the two must have rank 2.");
  }
  call->batch = call->lhs.batched ? call->lhs.batch : call->rhs.batch;
}

Matrix ParseBias(const Options& options, const Array& buffer, const Call& call) {
  const auto dims = buffer.dims;
  Matrix bias;
  bias.data = buffer.data;
  bias.type = DTypeOf("bias", buffer);
  bias.batched = options.bias == "batched_row";
  bias.batch = bias.batched ? call.batch : 1;
  bias.rows = 1;
  bias.cols = call.n;
  const bool right = bias.batched ? dims.size() == 2 && dims[0] == call.batch &&
                                        dims[1] == call.n
                                  : dims.size() == 1 && dims[0] == call.n;
  if (!right) {
    Refuse("bias has shape ", ShapeText(buffer), "; bias='", options.bias, "' takes (",
           bias.batched ? std::to_string(call.batch) + ", " : "", call.n, ").");
  }
  return bias;
}

Call ParseCall(const Options& options, const Arrays& args,
               const Arrays& rets) {
  CheckCounts(options, args.size(), rets.size());
  Call call;
  ParseProduct(options, args[0], args[1], &call);
  const bool batched = call.lhs.batched || call.rhs.batched;
  size_t next = 2;
  if (options.bias != "none") {
    call.has_bias = true;
    call.bias = ParseBias(options, args[next++], call);
  }
  if (options.has_residual) {
    call.has_residual = true;
    CheckLike("residual", args[next], call, batched);
    call.residual = ParseMatrix("residual", args[next++]);
  }
  CheckLike("out", rets[0], call, batched);
  call.out = ParseMatrix("out", rets[0]);
  if (options.save_preactivation) {
    call.has_preactivation = true;
    CheckLike("preactivation", rets[1], call, batched);
    call.preactivation = ParseMatrix("preactivation", rets[1]);
    if (call.preactivation.type != call.out.type) {
      Refuse("preactivation has element type ", rets[1].type,
             " and out has ", rets[0].type, "; they must be equal.");
    }
  }
  return call;
}

// Batches that share rhs and the epilogue are the rows of one taller product.
void MergeBatches(const Options& options, Call* call) {
  if (!call->lhs.batched || call->rhs.batched || options.trans_lhs) return;
  if (call->has_bias && call->bias.batched) return;
  for (Matrix* matrix :
       {&call->lhs, &call->residual, &call->out, &call->preactivation}) {
    matrix->rows *= matrix->batch;
    matrix->batch = 1;
    matrix->batched = false;
  }
  call->m *= call->batch;
  call->batch = 1;
}

cpu::GemmArgs MakeArgs(const Options& options, const Call& call) {
  cpu::GemmArgs args{};
  args.lhs = call.lhs.data;
  args.rhs = call.rhs.data;
  args.out = call.out.data;
  args.bias = call.has_bias ? call.bias.data : nullptr;
  args.residual = call.has_residual ? call.residual.data : nullptr;
  args.preactivation = call.has_preactivation ? call.preactivation.data : nullptr;
  args.m = call.m;
  args.n = call.n;
  args.k = call.k;
  args.lhs_stride = call.lhs.cols;
  args.rhs_stride = call.rhs.cols;
  args.out_stride = call.n;
  args.residual_stride = call.n;
  args.in_type = call.lhs.type;
  args.out_type = call.out.type;
  args.bias_type = call.bias.type;
  args.residual_type = call.residual.type;
  args.trans_lhs = options.trans_lhs;
  args.trans_rhs = options.trans_rhs;
  args.activation = options.activation;
  args.residual_op = options.residual_op;
  return args;
}

const void* Offset(const void* data, int64_t bytes) {
  return data ? static_cast<const char*>(data) + bytes : nullptr;
}
void* Offset(void* data, int64_t bytes) {
  return data ? static_cast<char*>(data) + bytes : nullptr;
}

cpu::GemmArgs BatchArgs(cpu::GemmArgs args, const Call& call, int64_t b) {
  args.lhs = Offset(args.lhs, b * call.lhs.batch_bytes());
  args.rhs = Offset(args.rhs, b * call.rhs.batch_bytes());
  args.bias = Offset(args.bias, b * call.bias.batch_bytes());
  args.residual = Offset(args.residual, b * call.residual.batch_bytes());
  args.out = Offset(args.out, b * call.out.batch_bytes());
  args.preactivation = Offset(args.preactivation, b * call.preactivation.batch_bytes());
  return args;
}

// Task `task` of the plan, on the calling thread.
void RunTask(const cpu::GemmIsa& isa, const cpu::GemmPlan& plan, const Call& call,
             const cpu::GemmArgs& args, int64_t task, float* workspace) {
  const cpu::MatrixRange range = plan.Range(task);
  const int64_t b0 = task / plan.num_m() / plan.num_n() * plan.batch_step;
  const int64_t b1 = std::min(b0 + plan.batch_step, plan.batch);
  for (int64_t b = b0; b < b1; ++b) {
    isa.run(BatchArgs(args, call, b), plan.blocks, range, workspace);
  }
}

void RunCall(Pool& pool, const Options& options, const Call& call) {
  const cpu::GemmArgs args = MakeArgs(options, call);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const cpu::GemmIsa& isa = *cpu::UsableGemmIsa(options.isa, args);
  const cpu::GemmPlan plan =
      cpu::PlanGemm(isa, args, call.batch, options.config, threads);
  if (plan.num_tasks() == 0) return;
  cpu::AdviseHugePages(args.out, call.out.size_bytes());
  if (args.preactivation) {
    cpu::AdviseHugePages(args.preactivation, call.preactivation.size_bytes());
  }
  RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    RunTask(isa, plan, call, args, task, workspace);
                  });
}

}  // namespace

void RunGemm(Pool& pool, const GemmOptions& options, Arrays operands, Arrays results) {
  Call call = ParseCall(options, operands, results);
  MergeBatches(options, &call);
  RunCall(pool, options, call);
}

}  // namespace tracea
