// Everything around the convolution kernels that is compiled without any instruction set
// flag: geometry of the directions, choice of instruction set, blocking, split to tasks.

#include "conv2d/conv2d.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/blocking.h"
#include "common/ladder.h"
#include "common/memory.h"

namespace tracea::cpu {

extern const ConvIsa kBaselineConv, kAvx2Conv, kAvx512Conv, kAvx512Bf16Conv, kAmxConv;

namespace {

constexpr int64_t kMaxCols = 4096;
constexpr int64_t kMaxPanelBytes = int64_t{16} << 20;  // packed block of weights
constexpr int64_t kDepthwiseCols = 256;                // channels whose weights fit L1

constexpr Ladder<ConvIsa> kConvs =
    TRACEA_LADDER(&kBaselineConv, &kAvx2Conv, &kAvx512Conv, &kAvx512Bf16Conv, &kAmxConv,
                  nullptr);

int64_t ItemSize(DType type) { return type == DType::kF32 ? 4 : 2; }

const void* Offset(const void* data, int64_t elements, DType type) {
  return data ? static_cast<const char*>(data) + elements * ItemSize(type) : nullptr;
}
void* Offset(void* data, int64_t elements, DType type) {
  return data ? static_cast<char*>(data) + elements * ItemSize(type) : nullptr;
}

// ---- Geometry -------------------------------------------------------------------------

// x[p * stride + k * dilation - padding] meets y[p] for tap k.
ConvAxis ForwardAxis(const ConvExtent& e) {
  ConvAxis axis{};
  axis.size = e.x;
  axis.rows = e.y;
  axis.step = e.stride;
  axis.taps = e.w;
  axis.offset = -e.padding;
  axis.tap_step = e.dilation;
  axis.next_tap = 1;
  axis.out_step = 1;
  axis.out_size = e.y;
  return axis;
}

// For entries i = phase + stride * r of x, those taps k for which y has an entry:
//
//   p * stride = i + padding - k * dilation
//
// Solutions k lie stride / gcd apart. They are taken in descending order, in which the
// entries of y ascend.
ConvAxis InputGradAxis(const ConvExtent& e, int64_t phase) {
  ConvAxis axis{};
  axis.size = e.y;
  axis.step = 1;
  axis.rows = e.x > phase ? CeilDiv(e.x - phase, e.stride) : 0;
  axis.out_first = phase;
  axis.out_step = e.stride;
  axis.out_size = e.x;
  const int64_t common = std::gcd(e.dilation, e.stride);
  const int64_t apart = e.stride / common, target = phase + e.padding;
  axis.tap_step = e.dilation / common;
  axis.next_tap = -apart;
  for (int64_t first = 0; first < std::min(apart, e.w); ++first) {
    if ((target - first * e.dilation) % e.stride != 0) continue;
    axis.taps = (e.w - 1 - first) / apart + 1;
    axis.first_tap = first + (axis.taps - 1) * apart;
    axis.offset = (target - axis.first_tap * e.dilation) / e.stride;
    break;
  }
  return axis;
}

// Stride 1 and one tap: the image is the matrix, whatever its shape.
bool IsPointwise(const ConvProduct& product) {
  const auto is_plain = [](const ConvAxis& axis) {
    return axis.taps == 1 && axis.step == 1 && axis.offset == 0 &&
           axis.rows == axis.size && axis.out_step == 1;
  };
  return is_plain(product.y) && is_plain(product.x);
}

// As one line such an image needs no division into images and lines.
void FlattenPointwise(ConvProduct* product) {
  if (!IsPointwise(*product)) return;
  const int64_t pixels = product->rows();
  product->batch = 1;
  product->y.size = product->y.rows = product->y.out_size = 1;
  product->x.size = product->x.rows = product->x.out_size = pixels;
}

// Channels and columns of a group; all at once for a depthwise kernel.
int64_t GroupChannels(const ConvArgs& args) { return args.channels / args.groups; }
int64_t GroupColumns(const ConvArgs& args) { return args.columns / args.groups; }

bool IsDepthwise(const ConvArgs& args) {
  return args.groups > 1 && args.channels == args.groups && args.columns == args.groups;
}

ConvProduct MakeProduct(const ConvArgs& args, int64_t phase_y, int64_t phase_x,
                        int64_t group) {
  const bool is_input_grad = args.direction == ConvDirection::kInputGrad;
  const bool depthwise = IsDepthwise(args);
  const int64_t inputs = depthwise ? args.channels : GroupChannels(args);
  const int64_t outputs = depthwise ? args.columns : GroupColumns(args);
  ConvProduct product{};
  product.batch = args.batch;
  product.y = is_input_grad ? InputGradAxis(args.height, phase_y)
                            : ForwardAxis(args.height);
  product.x =
      is_input_grad ? InputGradAxis(args.width, phase_x) : ForwardAxis(args.width);
  product.kernel_width = args.width.w;
  product.pixel = is_input_grad ? args.columns : args.channels;
  product.out_pixel = is_input_grad ? args.channels : args.columns;
  product.channels = is_input_grad ? outputs : inputs;
  product.columns = is_input_grad ? inputs : outputs;
  product.tap_size = depthwise ? args.columns : inputs * args.columns;
  product.weights_stride = args.columns;
  product.trans_weights = is_input_grad && !depthwise;
  product.in_type = args.in_type;
  product.out_type = args.out_type;
  product.bias_type = args.bias_type;
  product.residual_type = args.residual_type;
  product.activation = args.activation;
  const int64_t first = group * product.columns;
  product.image = Offset(args.lhs, group * product.channels, args.in_type);
  // dx has a group's channels beside each other, w their columns.
  product.weights = Offset(args.rhs, group * outputs, args.in_type);
  product.out = Offset(args.out, first, args.out_type);
  product.bias = Offset(args.bias, first, args.bias_type);
  product.residual = Offset(args.residual, first, args.residual_type);
  product.preactivation = Offset(args.preactivation, first, args.out_type);
  FlattenPointwise(&product);
  return product;
}

// Most taps that a row sees along one axis.
int64_t MostTaps(const ConvArgs& args, const ConvExtent& extent) {
  if (args.direction != ConvDirection::kInputGrad) return extent.w;
  const int64_t apart = extent.stride / std::gcd(extent.dilation, extent.stride);
  return CeilDiv(extent.w, apart);
}

// Of as many rows and taps as any group's and phase's product has: the first phase has the
// most rows.
ConvProduct LargestProduct(const ConvArgs& args) {
  ConvProduct product = MakeProduct(args, 0, 0, 0);
  product.y.taps = MostTaps(args, args.height);
  product.x.taps = MostTaps(args, args.width);
  return product;
}

// ---- Blocking -------------------------------------------------------------------------

// Sizes of the largest product; k as the kernel walks it.
struct Shape {
  int64_t m, n, k;
};

Shape ShapeOf(const ConvArgs& args, const ConvProduct& product, bool in_steps) {
  const int64_t taps_y = product.y.taps, taps_x = product.x.taps;
  // A depthwise kernel has a row for each tap, of all channels at once.
  const int64_t depth = taps_y * taps_x * (IsDepthwise(args) ? 1 : product.channels);
  if (args.direction == ConvDirection::kWeightGrad) {
    return {depth, product.columns, product.rows()};
  }
  if (!in_steps) return {product.rows(), product.columns, depth};
  // Runs of contiguous depth are filled up to whole steps.
  const int64_t run = product.channels * (product.merges_taps() ? taps_x : 1);
  const int64_t runs = taps_y * (product.merges_taps() ? 1 : taps_x);
  return {product.rows(), product.columns, runs * RoundUp(run, kConvDepthUnit)};
}

// Whether its packed operands are for vectors, not for matrices.
bool UsesVectors(const ConvIsa& isa) { return isa.packed_bytes == 4 || isa.pairs; }

// Whether it is for convolutions like this one.
bool Suits(const ConvIsa& isa, const ConvArgs& args, const ConvProduct& product) {
  if (isa.packed_bytes == 4) return true;
  if (args.in_type != DType::kBF16 || IsDepthwise(args)) return false;
  // Transposed weights of an odd number of channels have no pairs at the ends of taps.
  if (isa.pairs) return !product.trans_weights || product.channels % 2 == 0;
  // On AMX filling up short runs may cost more than it brings.
  return ShapeOf(args, product, true).k <= 4 * ShapeOf(args, product, false).k;
}

const ConvIsa& IsaFor(const ConvIsa& wanted, const ConvArgs& args,
                      const ConvProduct& product) {
  if (Suits(wanted, args, product)) return wanted;
  // Where AMX is, pairs are slow.
  const auto widens = [](const ConvIsa& isa) { return isa.packed_bytes == 4; };
  return *kConvs.Best(wanted.isa, widens);
}

ConvBlocks PlanBlocks(const ConvIsa& isa, const Shape& shape, const ConvConfig& config) {
  ConvBlocks blocks{};
  const int64_t kc = config.kc > 0 ? config.kc : 576 * 4 / isa.packed_bytes;
  blocks.kc = EqualStep(shape.k, std::min(kc, kConvMostDepth), kConvDepthUnit);
  // The packed block may take under half of L2: image, result and prefetches share.
  const int64_t fitting = L2Bytes() * 2 / 5 / (blocks.kc * isa.packed_bytes);
  const int64_t nc = config.nc > 0 ? config.nc : fitting;
  const int64_t most = std::min(kMaxCols, kMaxPanelBytes / (blocks.kc * 4));
  const int64_t cols = std::min(RoundUp(nc, isa.tile_n), RoundUp(shape.n, isa.tile_n));
  blocks.nc = std::max(std::min(cols, most / isa.tile_n * isa.tile_n), isa.tile_n);
  blocks.mc = std::max(isa.most_sums / (blocks.nc * 4) / isa.tile_m * isa.tile_m,
                       isa.tile_m);
  blocks.mc = std::min(blocks.mc, std::max(RoundUp(shape.m, isa.tile_m), isa.tile_m));
  return blocks;
}

// Cuts (m, n) into about `tasks` ranges of the least estimated time. In units of one
// multiply-add of a register tile: a task costs rows * cols * k, plus gathering its rows
// once per column strip and packing its weights once, at about 32 multiply-adds an
// element.
void PlanRanges(const ConvIsa& isa, int64_t tasks, ConvPlan* plan) {
  constexpr double kPack = 32;
  double best = -1;
  for (int64_t across = 1; across <= tasks; ++across) {
    const int64_t n_step = EqualStep(plan->n, CeilDiv(plan->n, across), isa.tile_n);
    const int64_t parts = std::max<int64_t>(CeilDiv(plan->n, n_step), 1);
    const int64_t down = CeilDiv(tasks, parts);
    const int64_t m_step = EqualStep(plan->m, CeilDiv(plan->m, down), isa.tile_m);
    const double strips = double(CeilDiv(n_step, plan->blocks.nc));
    const double cost = double(m_step) * n_step + kPack * (m_step * strips + n_step);
    const double rounds = CeilDiv(parts * CeilDiv(plan->m, m_step), tasks);
    if (best < 0 || cost * rounds < best) {
      best = cost * rounds;
      plan->m_step = m_step;
      plan->n_step = n_step;
    }
  }
}

// Below about 50 us of work, waking another thread costs more than it brings.
bool IsSmall(const ConvArgs& args, const Shape& shape) {
  const double products = double(args.groups) * shape.m * shape.n * shape.k;
  const double pixels = double(args.batch) * (args.height.x * args.width.x +
                                              args.height.y * args.width.y);
  return products < 3.5e6 && pixels * (args.channels + args.columns) < 2.5e5;
}

// Entries of x that agree modulo the stride; those that there are.
int64_t Phases(const ConvArgs& args, const ConvExtent& extent) {
  if (args.direction != ConvDirection::kInputGrad) return 1;
  return std::min(extent.stride, extent.x);
}

// x^T @ dy, both as they are stored: the gradient of the weights of one tap.
bool IsPlainProduct(const ConvArgs& args, const ConvProduct& product) {
  return args.direction == ConvDirection::kWeightGrad && args.groups == 1 &&
         IsPointwise(product);
}

GemmArgs PlainProduct(const ConvArgs& args, const ConvProduct& product) {
  GemmArgs gemm{};
  gemm.lhs = args.lhs;
  gemm.rhs = args.rhs;
  gemm.out = args.out;
  gemm.m = gemm.lhs_stride = args.channels;
  gemm.n = gemm.rhs_stride = gemm.out_stride = args.columns;
  gemm.k = product.rows();
  gemm.in_type = args.in_type;
  gemm.out_type = args.out_type;
  gemm.trans_lhs = true;
  return gemm;
}

ConvPlan PlanPlainProduct(const ConvIsa& wanted, const GemmArgs& gemm,
                          const ConvConfig& config, int64_t threads) {
  ConvPlan plan{};
  plan.gemm = UsableGemmIsa(wanted.isa, gemm);
  plan.product =
      PlanGemm(*plan.gemm, gemm, 1, {config.kc, config.nc, config.tasks}, threads);
  plan.workspace_bytes = plan.product.workspace_bytes;
  return plan;
}

const ConvKernel& KernelOf(const ConvIsa& isa, const ConvArgs& args) {
  const bool depthwise = IsDepthwise(args);
  if (args.direction == ConvDirection::kWeightGrad) {
    return depthwise ? isa.depthwise_weight_grad : isa.weight_grad;
  }
  return depthwise ? isa.depthwise : isa.conv;
}

}  // namespace

const ConvIsa* UsableConvIsa(Isa wanted) {
  return kConvs.Best(wanted, [](const ConvIsa&) { return true; });
}

ConvPlan PlanConv(const ConvIsa& wanted, const ConvArgs& args, const ConvConfig& config,
                  int64_t threads) {
  ConvPlan plan{};
  const ConvProduct product = LargestProduct(args);
  if (IsPlainProduct(args, product)) {
    return PlanPlainProduct(wanted, PlainProduct(args, product), config, threads);
  }
  const ConvIsa& isa = IsaFor(wanted, args, product);
  plan.kernel = &KernelOf(isa, args);
  plan.phases_y = Phases(args, args.height);
  plan.phases_x = Phases(args, args.width);
  const Shape shape = ShapeOf(args, product, !UsesVectors(isa));
  plan.blocks = PlanBlocks(isa, shape, config);
  if (IsDepthwise(args)) plan.blocks.nc = std::min(plan.blocks.nc, kDepthwiseCols);
  plan.groups = IsDepthwise(args) ? 1 : args.groups;
  plan.m = shape.m;
  plan.n = shape.n;
  plan.workspace_bytes = plan.kernel->workspace_bytes(product, plan.blocks);
  const int64_t per_thread = config.tasks > 0 ? std::min<int64_t>(config.tasks, 64) : 2;
  const bool serial = threads <= 1 || IsSmall(args, shape);
  const int64_t tasks = serial ? 1 : threads * per_thread;
  plan.group_step = std::max<int64_t>(CeilDiv(plan.groups, tasks), 1);
  PlanRanges(isa, plan.groups >= tasks ? 1 : CeilDiv(tasks, plan.groups), &plan);
  return plan;
}

void RunConvTask(const ConvPlan& plan, const ConvArgs& args, int64_t task,
                 float* workspace) {
  if (plan.gemm) {
    const GemmArgs gemm = PlainProduct(args, MakeProduct(args, 0, 0, 0));
    return plan.gemm->run(gemm, plan.product.blocks, plan.product.Range(task), workspace);
  }
  const auto next = [&task](int64_t count) {
    const int64_t at = task % count;
    task /= count;
    return at;
  };
  const int64_t m0 = next(plan.num_m()) * plan.m_step;
  const int64_t n0 = next(plan.num_n()) * plan.n_step;
  const int64_t g0 = next(plan.num_groups()) * plan.group_step;
  const int64_t phase_x = next(plan.phases_x), phase_y = task;
  const int64_t g1 = std::min(g0 + plan.group_step, plan.groups);
  for (int64_t group = g0; group < g1; ++group) {
    const ConvProduct product = MakeProduct(args, phase_y, phase_x, group);
    const bool by_weight = args.direction == ConvDirection::kWeightGrad;
    const int64_t m = by_weight ? plan.m : product.rows();
    const MatrixRange range{m0, std::min(m0 + plan.m_step, m), n0,
                            std::min(n0 + plan.n_step, product.columns)};
    if (range.m0 < range.m1) plan.kernel->run(product, plan.blocks, range, workspace);
  }
}

}  // namespace tracea::cpu
