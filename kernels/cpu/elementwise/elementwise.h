// Functions of each element of one or two arrays, without any XLA type:
//
//   out[i] = f(x[i], y[i])   or   f(x[i])
//
// The functions are those of table_impl.h. Each operation of a formula rounds once, to
// nearest: no products and sums are fused, and subnormal numbers are numbers, whatever the
// thread's mode is (see common/ieee.h). So results have the same bits with every
// instruction set, split into tasks or not.

#ifndef TRACEA_KERNELS_CPU_ELEMENTWISE_ELEMENTWISE_H_
#define TRACEA_KERNELS_CPU_ELEMENTWISE_ELEMENTWISE_H_

#include <algorithm>
#include <cstdint>

#include "common/isa.h"

namespace tracea::cpu {

enum class ElementType : int32_t { kF32, kF64, kC64, kC128 };

// The operand that is one number for all elements.
enum class ScalarSide : int32_t { kNone, kLeft, kRight };

// A function for elements of one type.
struct Elementwise {
  int operands;     // 1 or 2; y is null where there is one
  ElementType own;  // of the operands
  ScalarSide scalar;
  ElementType out;  // of the results
  // Elements [begin, end), on the calling thread, in its mode; see `Compute`.
  void (*run)(const void* x, const void* y, void* out, int64_t begin, int64_t end);
  // Copies to memory, past the caches; `to` and `from` are multiples of 32. Null where the
  // processor has no such stores.
  void (*stream)(void* to, const void* from, int64_t bytes);
};

struct ElementwiseIsa {
  Isa isa;
  // False if there is no function of the name, of `length` characters, or if it has no
  // operand to be a scalar.
  bool (*find)(const char* name, int64_t length, ElementType type, ScalarSide scalar,
               Elementwise* found);
};

// The kernels of the best instruction set, `wanted` at most, that build and machine have.
const ElementwiseIsa& UsableElementwiseIsa(Isa wanted);

int64_t ElementBytes(ElementType type);

// How the elements are cut into tasks: of `step` each, the first one `missing` less.
struct ElementwisePlan {
  int64_t size, step, missing;

  int64_t num_tasks() const { return size == 0 ? 0 : (size + missing - 1) / step + 1; }
  int64_t begin(int64_t task) const { return task == 0 ? 0 : task * step - missing; }
  int64_t end(int64_t task) const {
    return std::min(size, (task + 1) * step - missing);
  }
};

// A large result is cut where huge pages begin, so that a page is the work of one thread,
// which is the first to write it: the system clears it then, once.
// Args: elements and bytes of the result, tasks of each thread, threads.
ElementwisePlan PlanElementwise(const void* out, int64_t size, int64_t bytes,
                                int64_t tasks, int64_t threads);

// Elements [begin, end), on the calling thread, whatever its mode is. With `past_caches`
// results go to memory without being read into the caches first, which leaves more of the
// memory's bandwidth; it pays where they would not stay in the caches.
void Compute(const Elementwise& function, const void* x, const void* y, void* out,
             int64_t begin, int64_t end, bool past_caches);

}  // namespace tracea::cpu

#endif  // TRACEA_KERNELS_CPU_ELEMENTWISE_ELEMENTWISE_H_
