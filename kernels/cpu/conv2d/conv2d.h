// CPU convolutions of images, and their gradients, without any XLA type:
//
//   z = conv(x, w) + bias + residual;   y = activation(z)
//
// x (batch, height, width, channels), w (height, width, channels / groups, columns),
// y (batch, height, width, columns), all contiguous. Every direction is a matrix product
// one of whose operands is never written down: its rows are gathered from an image while
// a block of it is packed. Each group is a product of its own, and so is each phase of
// the input's gradient: the pixels whose coordinates agree modulo the strides see the
// same taps of the kernel, so no product meets the zeros between the strides.
//
// Taps that a window has outside of the image are passed over, but on AMX and, at the sides
// of the image, where elements must be converted first: there they are zeros that are
// multiplied, which only infinite and NaN weights can tell.
//
// Sums are kept in f32 and rounded once, at the store. Blocks of depth are summed one by
// one, ascending: a result's bits depend on shape, instruction set and the depth of these
// blocks, but neither on the split into tasks nor on the number of threads.
//
// On AMX and AVX-512 BF16 subnormal bf16 operands and results count as zero; elsewhere they
// do not.
//
// A kernel exists once per instruction set (`ConvIsa`). It computes one range of one
// product on the calling thread and neither allocates nor throws.

#ifndef TRACEA_KERNELS_CPU_CONV2D_CONV2D_H_
#define TRACEA_KERNELS_CPU_CONV2D_CONV2D_H_

#include <cstdint>

#include "common/isa.h"
#include "common/types.h"
#include "gemm/gemm.h"

namespace tracea::cpu {

enum class ConvDirection : int32_t { kForward, kInputGrad, kWeightGrad };

// Sizes along the image's height or width.
struct ConvExtent {
  int64_t x, w, y;
  int64_t stride, dilation;
  int64_t padding;  // before the first entry of x; negative crops
};

// One convolution. Of x, w and y two are read and one is written, as the direction says.
struct ConvArgs {
  ConvDirection direction;
  const void* lhs;       // x, or dy for the input's gradient
  const void* rhs;       // w, or dy for the weights' gradient
  void* out;             // y, dx or dw
  const void* bias;      // (columns,) or null; this and the next two only forward
  const void* residual;  // of y's shape, or null
  void* preactivation;   // of y's shape and out_type: receives z; or null
  int64_t batch, channels, columns, groups;
  ConvExtent height, width;
  DType in_type;  // of lhs and of rhs
  DType out_type, bias_type, residual_type;
  Activation activation;
};

// How one coordinate of the gathered image follows from a row of the product and a tap:
//
//   entry = row * step + offset + tap * tap_step, and zero outside of [0, size)
struct ConvAxis {
  int64_t size;                     // of the gathered image
  int64_t rows, step;               //
  int64_t taps, offset, tap_step;   //
  int64_t first_tap, next_tap;      // tap t is entry first_tap + t * next_tap of w
  int64_t out_first, out_step;      // row r is entry out_first + r * out_step of out
  int64_t out_size;                 //
};

// One group and one phase. With rows (n, y, x) and depth (tap y, tap x, channel):
//
//   out[row, j] = sum over depth of image[row, depth] * weights[depth, j]
//
// For the weights' gradient rows and depth change places, and `weights` is dy.
struct ConvProduct {
  const void* image;    // from the group's first channel
  const void* weights;  // from the group's first element
  void* out;            // this and the next ones from the group's first column
  const void* bias;
  const void* residual;
  void* preactivation;
  int64_t batch;
  int64_t pixel, channels;      // of the image: all, and those of this group
  int64_t out_pixel, columns;   // of out
  int64_t tap_size;             // elements of w from one tap to the next
  int64_t weights_stride;       // from one row of the weights, as stored, to the next
  bool trans_weights;           // stored (columns, channels) in each tap
  int64_t kernel_width;
  ConvAxis y, x;
  DType in_type, out_type, bias_type, residual_type;
  Activation activation;

  // Always inline, as kernels are compiled for other instruction sets than their callers.
  __attribute__((always_inline)) int64_t rows() const { return batch * y.rows * x.rows; }
  __attribute__((always_inline)) int64_t depth() const {
    return y.taps * x.taps * channels;
  }
  // Whether all taps of a line are one contiguous run of the image.
  __attribute__((always_inline)) bool merges_taps() const {
    return pixel == channels && x.tap_step == 1;
  }
};

// The free choices; 0 means the default. Only kc changes the result, by its rounding.
struct ConvConfig {
  int64_t kc;     // depth of a packed block
  int64_t nc;     // its width, in columns
  int64_t tasks;  // ranges per thread
};

// Blocking as the kernel uses it; made by `PlanConv`.
struct ConvBlocks {
  int64_t kc, nc, mc;
};

constexpr int64_t kConvDepthUnit = 32;    // kc is a multiple of it,
constexpr int64_t kConvMostDepth = 4096;  // and at most this

struct ConvKernel {
  void (*run)(const ConvProduct& product, const ConvBlocks& blocks,
              const MatrixRange& range, float* workspace);
  // That `run` lays out, for any range. It grows with rows and taps.
  int64_t (*workspace_bytes)(const ConvProduct& product, const ConvBlocks& blocks);
};

struct ConvIsa {
  Isa isa;
  int64_t tile_m, tile_n;  // register tile, in elements
  int64_t packed_bytes;    // of an element of packed weights: 2 as bf16, else 4
  int64_t most_sums;       // bytes of partial sums that a row strip may have
  ConvKernel conv;         // forward and the input's gradient
  ConvKernel weight_grad;
  // The same for groups of one channel and one column, all at once; of f32 only.
  ConvKernel depthwise, depthwise_weight_grad;
  bool pairs = false;  // vectors of pairs of bf16 (none are depthwise), of f32 otherwise
};

// How a convolution is cut into tasks.
struct ConvPlan {
  // If it is a product of plain matrices: what runs it, and how that is cut. Nothing else
  // but the workspace is set then.
  const GemmIsa* gemm;
  GemmPlan product;
  const ConvKernel* kernel;
  ConvBlocks blocks;
  int64_t phases_y, phases_x;
  int64_t groups, group_step;
  int64_t m, m_step;  // of the largest phase
  int64_t n, n_step;
  // For one running task, 64-byte aligned: below 24 MB, or what a plain product needs, or
  // 1 KB for each tap of a kernel with a channel in each group.
  int64_t workspace_bytes;

  int64_t num_m() const { return m == 0 ? 0 : (m - 1) / m_step + 1; }
  int64_t num_n() const { return n == 0 ? 0 : (n - 1) / n_step + 1; }
  int64_t num_groups() const { return groups == 0 ? 0 : (groups - 1) / group_step + 1; }
  int64_t num_tasks() const {
    if (gemm) return product.num_tasks();
    return phases_y * phases_x * num_groups() * num_m() * num_n();
  }
};

ConvPlan PlanConv(const ConvIsa& wanted, const ConvArgs& args, const ConvConfig& config,
                  int64_t threads);

// Task `task` of the plan, on the calling thread.
void RunConvTask(const ConvPlan& plan, const ConvArgs& args, int64_t task,
                 float* workspace);

// The kernels of the best instruction set, `wanted` at most, that build and machine have.
// A convolution which they do not suit runs on those of a lower one.
const ConvIsa* UsableConvIsa(Isa wanted);

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_CONV2D_CONV2D_H_
