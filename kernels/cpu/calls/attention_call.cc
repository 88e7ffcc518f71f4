// Calls of attention on the CPU and of its gradient:
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
// The gradient takes the same operands without a bias, then
//   o    q's shape and dtype
//   lse  (batch, heads, q_len), f32
//   do   q's shape and dtype: the cotangent of o
// and gives dq, dk and dv, of the shapes and dtype of q, k and v.

#include "calls/attention_call.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "attention/attention.h"

namespace tracea {
namespace {

using Options = AttentionOptions;

constexpr int64_t kAbi = 2;  // of the attributes

int64_t ParseSide(const Attributes& attrs, std::string_view name) {
  const auto side = Attribute<int64_t>(attrs, name);
  return std::clamp(side, -cpu::kUnlimited, cpu::kUnlimited);
}

}  // namespace

AttentionOptions ParseAttention(const Attributes& attrs) {
  CheckAbi(attrs, kAbi);
  Options options{};
  options.has_bias = Attribute<bool>(attrs, "has_bias");
  options.has_mask = Attribute<bool>(attrs, "has_mask");
  options.has_q_lengths = Attribute<bool>(attrs, "has_q_lengths");
  options.has_kv_lengths = Attribute<bool>(attrs, "has_kv_lengths");
  options.isa = IsaAttribute(attrs);
  options.config.block_q = SizeAttribute(attrs, "block_q", 0);  // 0 for the default
  options.config.block_kv = SizeAttribute(attrs, "block_kv", 0);
  options.config.passes = Attribute<int64_t>(attrs, "passes");
  if (options.config.passes != 1 && options.config.passes != 2) {
    Refuse("passes=", options.config.passes, "; there are 1 or 2.");
  }
  options.scale = static_cast<float>(Attribute<double>(attrs, "scale"));
  options.is_causal = Attribute<bool>(attrs, "is_causal");
  options.left = ParseSide(attrs, "left");
  options.right = ParseSide(attrs, "right");
  return options;
}

namespace {

void CheckShape(const char* name, const Array& buffer,
                std::initializer_list<int64_t> wanted) {
  const auto dims = buffer.dims;
  if (!std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end())) {
    Refuse(name, " has shape ", ShapeText(dims), "; the other operands ask for ",
           ShapeText(wanted), ".");
  }
}

void CheckType(const char* name, const Array& buffer, ArrayType wanted) {
  if (buffer.type != wanted) {
    Refuse(name, " has element type ", buffer.type, "; it must be ", wanted,
           ".");
  }
}

// Strides of an array that broadcasts to (batch, heads, q_len, kv_len).
void BroadcastStrides(const char* name, const Array& buffer,
                      const cpu::AttentionArgs& args, int64_t (&strides)[4]) {
  const auto dims = buffer.dims;
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

void ParseShapes(const Array& q, const Array& k,
                 cpu::AttentionArgs* args) {
  const auto of_q = q.dims, of_k = k.dims;
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

void ParseOptional(const Options& options, const Arrays& operands,
                   cpu::AttentionArgs* args) {
  size_t next = 3;
  if (options.has_bias) {
    const Array bias = operands[next++];
    args->bias = bias.data;
    args->bias_type = DTypeOf("bias", bias);
    BroadcastStrides("bias", bias, *args, args->bias_strides);
  }
  if (options.has_mask) {
    const Array mask = operands[next++];
    CheckType("mask", mask, ArrayType::kPred);
    args->mask = static_cast<const uint8_t*>(mask.data);
    BroadcastStrides("mask", mask, *args, args->mask_strides);
  }
  for (auto [name, given, lengths] :
       {std::make_tuple("q_lengths", options.has_q_lengths, &args->q_lengths),
        std::make_tuple("kv_lengths", options.has_kv_lengths, &args->kv_lengths)}) {
    if (!given) continue;
    const Array buffer = operands[next++];
    CheckType(name, buffer, ArrayType::kS32);
    CheckShape(name, buffer, {args->batch});
    *lengths = static_cast<const int32_t*>(buffer.data);
  }
}

cpu::AttentionArgs ParseInputs(const Options& options, const Arrays& operands) {
  cpu::AttentionArgs args{};
  const Array q = operands[0], k = operands[1],
                       v = operands[2];
  ParseShapes(q, k, &args);
  args.type = DTypeOf("q", q);
  CheckType("k", k, q.type);
  CheckType("v", v, q.type);
  CheckShape("v", v, {args.batch, args.kv_len, args.kv_heads, args.head_dim});
  args.q = q.data;
  args.k = k.data;
  args.v = v.data;
  ParseOptional(options, operands, &args);
  args.scale = options.scale;
  args.causal = options.is_causal;
  args.left = options.left;
  args.right = options.right;
  return args;
}

cpu::AttentionArgs ParseForward(const Options& options, const Arrays& operands,
                                const Arrays& results) {
  if (operands.size() != options.operands() || results.size() < 1 || results.size() > 2) {
    Refuse("got ", operands.size(), " operands and ", results.size(),
           " results; it takes ", options.operands(), " operands and 1 or 2 results.");
  }
  cpu::AttentionArgs args = ParseInputs(options, operands);
  const Array out = results[0];
  CheckType("o", out, operands[0].type);
  CheckShape("o", out, {args.batch, args.q_len, args.heads, args.head_dim});
  args.out = out.data;
  if (results.size() == 2) {
    const Array lse = results[1];
    args.lse_type = DTypeOf("lse", lse);
    CheckShape("lse", lse, {args.batch, args.heads, args.q_len});
    args.lse = lse.data;
  }
  return args;
}

cpu::AttentionGradientArgs ParseGradient(const Options& options,
                                         const Arrays& operands,
                                         const Arrays& results) {
  if (options.has_bias) Refuse("the gradient takes no bias.");
  const size_t next = options.operands();
  if (operands.size() != next + 3 || results.size() != 3) {
    Refuse("got ", operands.size(), " operands and ", results.size(),
           " results; it takes ", next + 3, " operands and 3 results.");
  }
  cpu::AttentionGradientArgs args{};
  cpu::AttentionArgs& a = args.forward;
  a = ParseInputs(options, operands);
  const auto check = [&](const char* name, const Array& buffer, bool is_key) {
    CheckType(name, buffer, operands[0].type);
    CheckShape(name, buffer, {a.batch, is_key ? a.kv_len : a.q_len,
                              is_key ? a.kv_heads : a.heads, a.head_dim});
    return buffer.data;
  };
  const Array lse = operands[next + 1];
  CheckType("lse", lse, ArrayType::kF32);
  CheckShape("lse", lse, {a.batch, a.heads, a.q_len});
  a.lse = lse.data;
  a.out = check("o", operands[next], false);
  args.dout = check("do", operands[next + 2], false);
  args.dq = check("dq", results[0], false);
  args.dk = check("dk", results[1], true);
  args.dv = check("dv", results[2], true);
  return args;
}

void AdviseLike(void* data, const cpu::AttentionArgs& args, bool is_key) {
  const int64_t rows = is_key ? args.kv_len * args.kv_heads : args.q_len * args.heads;
  cpu::AdviseHugePages(data, args.batch * rows * args.head_dim * ItemSize(args.type));
}

void RunForward(Pool& pool, const Options& options,
                      const cpu::AttentionArgs& args) {
  const cpu::AttentionIsa& isa = *cpu::UsableAttentionIsa(options.isa, args.type);
  const cpu::AttentionPlan plan =
      cpu::PlanAttention(isa, args, options.config, pool.num_threads());
  AdviseLike(args.out, args, false);
  RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    isa.forward.run(args, plan.block_kv, plan.range(task), workspace);
                  });
}

void RunGradient(Pool& pool, const Options& options,
                       const cpu::AttentionGradientArgs& args) {
  const cpu::AttentionGradientIsa& isa =
      *cpu::UsableAttentionGradientIsa(options.isa, args.forward.type);
  const cpu::AttentionGradientPlan plan =
      cpu::PlanAttentionGradient(isa, args, options.config, pool.num_threads());
  AdviseLike(args.dq, args.forward, false);
  AdviseLike(args.dk, args.forward, true);
  AdviseLike(args.dv, args.forward, true);
  RunTasks(pool, plan.num_tasks(), plan.workspace_bytes,
                  [&](int64_t task, float* workspace) {
                    cpu::RunTask(isa, args, plan, task, workspace);
                  });
}

}  // namespace

void RunAttention(Pool& pool, const AttentionOptions& options, Arrays operands,
                  Arrays results) {
  RunForward(pool, options, ParseForward(options, operands, results));
}

void RunAttentionGradient(Pool& pool, const AttentionOptions& options, Arrays operands,
                          Arrays results) {
  RunGradient(pool, options, ParseGradient(options, operands, results));
}

}  // namespace tracea
