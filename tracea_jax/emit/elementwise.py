"""Elementwise functions as text: a kernel for GPUs, and the header of those for CPUs.

Both hold the formulas of ``problem.elementwise.FUNCTIONS``. The header lies with the
kernels for CPUs, as they are built before this package runs:

    python -m tracea_jax.emit.elementwise > kernels/cpu/elementwise/table_impl.h
"""

from __future__ import annotations

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem.elementwise import ELEMENTS, FUNCTIONS, ElementwiseProblem

PACK_BYTES = 16
_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "complex64": "tracea::Complex<float>",
    "complex128": "tracea::Complex<double>",
}
_SCALARS = ("none", "left", "right")
# What formulas call, beside ``magnitude`` and ``root``, which each compiler has its own
# names for.
_HELPERS = """
// Powers of two: above kHuge squares may overflow, below kTiny vanish.
template <typename T>
struct Scales;
template <>
struct Scales<float> {
  static constexpr float kHuge = 0x1p60f, kTiny = 0x1p-60f, kMost = 0x1.fffffep127f;
  static constexpr float kUp = 0x1p100f, kDown = 0x1p-100f;
};
template <>
struct Scales<double> {
  static constexpr double kHuge = 0x1p500, kTiny = 0x1p-500,
                          kMost = 0x1.fffffffffffffp1023;
  static constexpr double kUp = 0x1p600, kDown = 0x1p-600;
};

// The length of (re, im), both scaled so that their squares are normal numbers.
template <typename T>
INLINE T length(T re, T im) {
  using S = Scales<T>;
  const T a = magnitude(re), b = magnitude(im), larger = a > b ? a : b;
  const bool is_huge = larger > S::kHuge, is_tiny = larger < S::kTiny;
  const T scale = is_huge ? S::kDown : is_tiny ? S::kUp : T(1);
  const T back = is_huge ? S::kUp : is_tiny ? S::kDown : T(1);
  const T x = re * scale, y = im * scale;
  const T found = root(x * x + y * y) * back;
  return a > S::kMost ? a : b > S::kMost ? b : found;
}

// x / y by R. L. Smith, Algorithm 116 (1962): both are divided by the larger part of y.
// Divided by zero, the parts of x are multiplied with infinity.
template <typename T>
INLINE Complex<T> quotient(Complex<T> x, Complex<T> y) {
  const bool is_zero = (y.re == 0) & (y.im == 0);
  const bool is_real = magnitude(y.re) >= magnitude(y.im);
  const T large = is_real ? y.re : y.im, small = is_real ? y.im : y.re;
  const T ratio = small / large;
  const T scale = T(1) / (is_zero ? T(0) : large + small * ratio);
  const T re = is_real ? x.re + x.im * ratio : x.re * ratio + x.im;
  const T im = is_real ? x.im - x.re * ratio : x.im * ratio - x.re;
  return {(is_zero ? x.re : re) * scale, (is_zero ? x.im : im) * scale};
}
"""
# Products and sums of the formulas round on their own, as on CPUs.
_OPTIONS = ("--fmad=false",)


def kernel(
    problem: ElementwiseProblem, device: CudaDevice, *, threads: int, packs: int
) -> Kernel:
    """The launch for a problem.

    Args:
      problem: with elements.
      device: its target.
      threads: of a block.
      packs: 16 bytes of each operand, of each thread.
    """
    p = problem
    itemsize, _ = ELEMENTS[p.dtype]
    tile = threads * packs * (PACK_BYTES // itemsize)
    scalar = "" if p.scalar == "none" else f"_{p.scalar}"
    entry = f"{p.function}{scalar}_{p.dtype}_{threads}x{packs}"
    operands = p.row.operands
    params: list[Param] = [Pointer(operand=i) for i in range(operands + 1)]
    return Kernel(
        entry=entry,
        source=_source(p, entry, threads, packs),
        headers=sources.headers("elementwise.cuh"),
        arch=device.arch,
        options=_OPTIONS,
        grid=(-(-p.size // tile), 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        params=(*params, Scalar(value=p.size, dtype="int64")),
    )


def _source(p: ElementwiseProblem, entry: str, threads: int, packs: int) -> str:
    formula = p.row.complex if p.is_complex else p.row.real
    y = "const Element* y, " * (p.row.operands == 2)
    return f"""\
// elementwise | {p.function} {p.dtype}, scalar {p.scalar}
#include "elementwise.cuh"

namespace tracea {{{_helpers("__device__ inline")}}}  // namespace tracea

namespace {{
struct Traits {{
  using Element = {_C_TYPES[p.dtype]};
  using Result = {_C_TYPES[p.out]};
  static constexpr int kThreads = {threads}, kPacks = {packs}, \
kOperands = {p.row.operands}, kScalar = {_SCALARS.index(p.scalar)};
  static __device__ Result f(Element x, Element y) {{
    using namespace tracea;
    return {formula};
  }}
}};
}}  // namespace

using Element = Traits::Element;
extern "C" __global__ void __launch_bounds__({threads})
{entry}(const Element* x, {y}Traits::Result* out, long long size) {{
  tracea::elementwise<Traits>(x, {"y" if y else "x"}, out, size);
}}
"""


def cpu_header() -> str:
    """The table as C++: a struct of each function, and the list of them."""
    structs = "".join(
        f"""
struct {_camel(name)} {{
  static constexpr int kOperands = {row.operands};
  template <typename T>
  [[gnu::always_inline]] static inline T Of(T x, [[maybe_unused]] T y) {{
    return {row.real};
  }}
  template <typename T>
  [[gnu::always_inline]] static inline {"Complex<T>" if row.keeps_complex else "T"} Of(
      Complex<T> x, [[maybe_unused]] Complex<T> y) {{
    return {row.complex};
  }}
}};
"""
        for name, row in FUNCTIONS.items()
    )
    listed = " \\\n".join(f'  ROW("{name}", {_camel(name)})' for name in FUNCTIONS)
    return f"""\
// Elementwise functions. Written by tracea_jax/emit/elementwise.py from the table in
// tracea_jax/problem/elementwise.py; a test compares.
{_helpers("[[gnu::always_inline]] inline")}{structs}
#define ELEMENTWISE_TABLE(ROW) \\
{listed}
"""


def _helpers(inline: str) -> str:
    return _HELPERS.replace("INLINE", inline)


def _camel(name: str) -> str:
    return name.title().replace("_", "")


if __name__ == "__main__":
    print(cpu_header(), end="")
