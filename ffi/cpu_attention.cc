// XLA FFI handlers of attention on the CPU and of its gradient:
//
//   o = softmax(scale * q @ k' + bias, where allowed) @ v, for each head
//
// Operands, in this order:
//   q          (batch, q_len, heads, head_dim), f32, bf16 or f16
//   k, v       (batch, kv_len, kv_heads, head_dim), q's dtype
//   bias       f32, bf16 or f16, if has_bias; dimensions those of (batch, heads, q_len,
//              kv_len) or 1
//   mask       boolean, if has_mask; dimensions likewise
//   q_lengths  (batch,), s32, if has_q_lengths
//   kv_lengths (batch,), s32, if has_kv_lengths
// Results:
//   o    q's shape and dtype
//   lse  (batch, heads, q_len), f32, bf16 or f16: optional
//
//
// The gradient takes the same operands without a bias, then
//   o    q's shape and dtype
//   lse  (batch, heads, q_len), f32
//   do   q's shape and dtype: the cotangent of o
// and gives dq, dk and dv, of the shapes and dtype of q, k and v.
//
// The handlers are stateless. They run on XLA's thread pool and on the calling thread.

#include "cpu_attention.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "attention/attention.h"
#include "cpu_call.h"
#include "xla/ffi/api/ffi.h"

namespace tracea {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kAbi = 2;  // of the attributes

struct Options {
  bool has_bias, has_mask, has_q_lengths, has_kv_lengths;
  cpu::Isa isa;
  cpu::AttentionConfig config;

  size_t operands() const {
    return 3 + has_bias + has_mask + has_q_lengths + has_kv_lengths;
  }
};

Options ParseOptions(const ffi::Dictionary& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.has_bias = Attribute<bool>(attrs, "has_bias");
  options.has_mask = Attribute<bool>(attrs, "has_mask");
  options.has_q_lengths = Attribute<bool>(attrs, "has_q_lengths");
  options.has_kv_lengths = Attribute<bool>(attrs, "has_kv_lengths");
  options.isa = IsaAttribute(attrs);
  options.config.block_q = Attribute<int64_t>(attrs, "block_q");
  options.config.block_kv = Attribute<int64_t>(attrs, "block_kv");
  options.config.passes = Attribute<int64_t>(attrs, "passes");
  if (options.config.block_q < 0 || options.config.block_kv < 0) {
    Refuse("block_q=", options.config.block_q, ", block_kv=", options.config.block_kv,
           " must not be negative; 0 chooses the default.");
  }
  if (options.config.passes != 1 && options.config.passes != 2) {
    Refuse("passes=", options.config.passes, "; there are 1 or 2.");
  }
  return options;
}

void CheckShape(const char* name, const ffi::AnyBuffer& buffer,
                std::initializer_list<int64_t> wanted) {
  const auto dims = buffer.dimensions();
  if (!std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end())) {
    Refuse(name, " has shape ", ShapeText(dims), "; the other operands ask for ",
           ShapeText(wanted), ".");
  }
}

void CheckType(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType wanted) {
  if (buffer.element_type() != wanted) {
    Refuse(name, " has element type ", buffer.element_type(), "; it must be ", wanted,
           ".");
  }
}

// Strides of an array that broadcasts to (batch, heads, q_len, kv_len).
void BroadcastStrides(const char* name, const ffi::AnyBuffer& buffer,
                      const cpu::AttentionArgs& args, int64_t (&strides)[4]) {
  const auto dims = buffer.dimensions();
  const int64_t whole[4] = {args.batch, args.heads, args.q_len, args.kv_len};
  bool fits = dims.size() == 4;
  for (size_t i = 0; fits && i < 4; ++i) fits = dims[i] == 1 || dims[i] == whole[i];
  if (!fits) {
    Refuse(name, " has shape ", ShapeText(dims), "; it must broadcast to ",
           ShapeText(whole), ".");
  }
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    strides[i] = dims[i] == 1 ? 0 : stride;
    stride *= dims[i];
  }
}

void ParseShapes(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
                 cpu::AttentionArgs* args) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  if (of_q.size() != 4 || of_k.size() != 4 || of_q[0] != of_k[0] || of_q[3] != of_k[3]) {
    Refuse("q has shape ", ShapeText(of_q), " and k has shape ", ShapeText(of_k),
           "; they must be (batch, length, heads, head_dim) of the same batch and "
           "head_dim.");
  }
  args->batch = of_q[0];
  args->q_len = of_q[1];
  args->heads = of_q[2];
  args->head_dim = of_q[3];
  args->kv_len = of_k[1];
  args->kv_heads = of_k[2];
  if (args->kv_heads == 0 || args->heads % args->kv_heads != 0) {
    Refuse("q has ", args->heads, " heads, no multiple of k's ", args->kv_heads, ".");
  }
  if (args->head_dim == 0 || args->head_dim > cpu::kMaxHeadDim || args->kv_len == 0) {
    Refuse("head_dim is ", args->head_dim, " and kv_len is ", args->kv_len,
           "; head_dim must be from 1 to ", cpu::kMaxHeadDim, ", kv_len at least 1.");
  }
}

ffi::AnyBuffer Operand(const ffi::RemainingArgs& args, size_t i) {
  return *args.get<ffi::AnyBuffer>(i);
}

ffi::AnyBuffer Result(const ffi::RemainingRets& rets, size_t i) {
  return **rets.get<ffi::AnyBuffer>(i);
}

void ParseOptional(const Options& options, const ffi::RemainingArgs& operands,
                   cpu::AttentionArgs* args) {
  size_t next = 3;
  if (options.has_bias) {
    const ffi::AnyBuffer bias = Operand(operands, next++);
    args->bias = bias.untyped_data();
    args->bias_type = DTypeOf("bias", bias);
    BroadcastStrides("bias", bias, *args, args->bias_strides);
  }
  if (options.has_mask) {
    const ffi::AnyBuffer mask = Operand(operands, next++);
    CheckType("mask", mask, ffi::DataType::PRED);
    args->mask = static_cast<const uint8_t*>(mask.untyped_data());
    BroadcastStrides("mask", mask, *args, args->mask_strides);
  }
  for (auto [name, given, lengths] :
       {std::make_tuple("q_lengths", options.has_q_lengths, &args->q_lengths),
        std::make_tuple("kv_lengths", options.has_kv_lengths, &args->kv_lengths)}) {
    if (!given) continue;
    const ffi::AnyBuffer buffer = Operand(operands, next++);
    CheckType(name, buffer, ffi::DataType::S32);
    CheckShape(name, buffer, {args->batch});
    *lengths = static_cast<const int32_t*>(buffer.untyped_data());
  }
}

void ParseMasking(const ffi::Dictionary& attrs, cpu::AttentionArgs* args) {
  const auto clamped = [](int64_t side) {
    return std::clamp(side, -cpu::kUnlimited, cpu::kUnlimited);
  };
  args->scale = static_cast<float>(Attribute<double>(attrs, "scale"));
  args->causal = Attribute<bool>(attrs, "is_causal");
  args->left = clamped(Attribute<int64_t>(attrs, "left"));
  args->right = clamped(Attribute<int64_t>(attrs, "right"));
}

cpu::AttentionArgs ParseInputs(const Options& options, const ffi::Dictionary& attrs,
                               const ffi::RemainingArgs& operands) {
  cpu::AttentionArgs args{};
  const ffi::AnyBuffer q = Operand(operands, 0), k = Operand(operands, 1),
                       v = Operand(operands, 2);
  ParseShapes(q, k, &args);
  args.type = DTypeOf("q", q);
  CheckType("k", k, q.element_type());
  CheckType("v", v, q.element_type());
  CheckShape("v", v, {args.batch, args.kv_len, args.kv_heads, args.head_dim});
  args.q = q.untyped_data();
  args.k = k.untyped_data();
  args.v = v.untyped_data();
  ParseOptional(options, operands, &args);
  ParseMasking(attrs, &args);
  return args;
}

cpu::AttentionArgs ParseForward(const Options& options, const ffi::Dictionary& attrs,
                                const ffi::RemainingArgs& operands,
                                const ffi::RemainingRets& results) {
  if (operands.size() != options.operands() || results.size() < 1 || results.size() > 2) {
    Refuse("got ", operands.size(), " operands and ", results.size(),
           " results; it takes ", options.operands(), " operands and 1 or 2 results.");
  }
  cpu::AttentionArgs args = ParseInputs(options, attrs, operands);
  const ffi::AnyBuffer out = Result(results, 0);
  CheckType("o", out, Operand(operands, 0).element_type());
  CheckShape("o", out, {args.batch, args.q_len, args.heads, args.head_dim});
  args.out = out.untyped_data();
  if (results.size() == 2) {
    const ffi::AnyBuffer lse = Result(results, 1);
    args.lse_type = DTypeOf("lse", lse);
    CheckShape("lse", lse, {args.batch, args.heads, args.q_len});
    args.lse = lse.untyped_data();
  }
  return args;
}

cpu::AttentionGradientArgs ParseGradient(const Options& options,
                                         const ffi::Dictionary& attrs,
                                         const ffi::RemainingArgs& operands,
                                         const ffi::RemainingRets& results) {
  if (options.has_bias) Refuse("the gradient takes no bias.");
  const size_t next = options.operands();
  if (operands.size() != next + 3 || results.size() != 3) {
    Refuse("got ", operands.size(), " operands and ", results.size(),
           " results; it takes ", next + 3, " operands and 3 results.");
  }
  cpu::AttentionGradientArgs args{};
  cpu::AttentionArgs& a = args.forward;
  a = ParseInputs(options, attrs, operands);
  const auto check = [&](const char* name, const ffi::AnyBuffer& buffer, bool is_key) {
    CheckType(name, buffer, Operand(operands, 0).element_type());
    CheckShape(name, buffer, {a.batch, is_key ? a.kv_len : a.q_len,
                              is_key ? a.kv_heads : a.heads, a.head_dim});
    return buffer.untyped_data();
  };
  const ffi::AnyBuffer lse = Operand(operands, next + 1);
  CheckType("lse", lse, ffi::DataType::F32);
  CheckShape("lse", lse, {a.batch, a.heads, a.q_len});
  a.lse = lse.untyped_data();
  a.out = check("o", Operand(operands, next), false);
  args.dout = check("do", Operand(operands, next + 2), false);
  args.dq = check("dq", Result(results, 0), false);
  args.dk = check("dk", Result(results, 1), true);
  args.dv = check("dv", Result(results, 2), true);
  return args;
}

void AdviseLike(void* data, const cpu::AttentionArgs& args, bool is_key) {
  const int64_t rows = is_key ? args.kv_len * args.kv_heads : args.q_len * args.heads;
  cpu::AdviseHugePages(data, args.batch * rows * args.head_dim * ItemSize(args.type));
}

ffi::Error RunForward(ffi::ThreadPool& pool, const Options& options,
                      const cpu::AttentionArgs& args) {
  const cpu::AttentionIsa& isa = *cpu::UsableAttentionIsa(options.isa, args.type);
  const cpu::AttentionPlan plan =
      cpu::PlanAttention(isa, args, options.config, pool.num_threads());
  AdviseLike(args.out, args, false);
  return RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    isa.forward.run(args, plan.block_kv, plan.range(task), workspace);
                  });
}

ffi::Error RunGradient(ffi::ThreadPool& pool, const Options& options,
                       const cpu::AttentionGradientArgs& args) {
  const cpu::AttentionGradientIsa& isa =
      *cpu::UsableAttentionGradientIsa(options.isa, args.forward.type);
  const cpu::AttentionGradientPlan plan =
      cpu::PlanAttentionGradient(isa, args, options.config, pool.num_threads());
  AdviseLike(args.dq, args.forward, false);
  AdviseLike(args.dk, args.forward, true);
  AdviseLike(args.dv, args.forward, true);
  return RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    cpu::RunTask(isa, args, plan, task, workspace);
                  });
}

ffi::Error CpuAttention(ffi::ThreadPool pool, ffi::Dictionary attrs,
                        ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Guarded("tracea_cpu_attention_v1", [&] {
    const Options options = ParseOptions(attrs);
    return RunForward(pool, options, ParseForward(options, attrs, args, rets));
  });
}

ffi::Error CpuAttentionGradient(ffi::ThreadPool pool, ffi::Dictionary attrs,
                                ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Guarded("tracea_cpu_attention_gradient_v1", [&] {
    const Options options = ParseOptions(attrs);
    return RunGradient(pool, options, ParseGradient(options, attrs, args, rets));
  });
}

}  // namespace
}  // namespace tracea

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cpu_attention_v1, tracea::CpuAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tracea_cpu_attention_gradient_v1,
                              tracea::CpuAttentionGradient,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());
