"""Functions of each element, reductions and copies, as text: what is between kernels.

    out[i] = function(x[i], ...)          out[i, k] = sum over j of x[i, j, k]

Elements are computed in float, or in double if an array is, and rounded once. Sums are
made by the threads of a block in a fixed order. Bundles run these, and no op of JAX:
XLA's own loops are better where there is XLA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar

# Of the operands x, y and z, of type T.
_FORMULAS = {
    **{name: f"{name}(x)" for name in "floor ceil rint round sqrt rsqrt cbrt".split()},
    **{name: f"{name}(x)" for name in "exp exp2 expm1 log log1p erf erfc".split()},
    **{name: f"{name}(x)" for name in "sin cos tan asin acos atan".split()},
    **{name: f"{name}(x)" for name in "sinh cosh tanh asinh acosh atanh".split()},
    "convert": "x",
    "neg": "-x",
    "abs": "fabs(x)",
    "sign": "x > 0 ? 1 : x < 0 ? -1 : x * 0",  # zeros keep theirs
    "is_finite": "isfinite(x)",
    "not": "x == 0",
    "square": "x * x",
    "logistic": "1 / (1 + exp(-x))",
    "add": "x + y",
    "sub": "x - y",
    "mul": "x * y",
    "div": "x / y",
    "rem": "fmod(x, y)",
    "pow": "pow(x, y)",
    "atan2": "atan2(x, y)",
    "max": "larger(x, y)",
    "min": "smaller(x, y)",
    "gt": "x > y",
    "ge": "x >= y",
    "lt": "x < y",
    "le": "x <= y",
    "eq": "x == y",
    "ne": "x != y",
    "select": "x != 0 ? z : y",
    "clamp": "smaller(larger(y, x), z)",
}
_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "Bf16",
    "bool": "unsigned char",
}
_THREADS = 256
_MOST_BLOCKS = 1 << 16

_COMMON = """\
struct Bf16 { unsigned short bits; };

template <typename T> __device__ T load(float x) { return x; }
template <typename T> __device__ T load(double x) { return x; }
template <typename T> __device__ T load(unsigned char x) { return x != 0; }
template <typename T> __device__ T load(Bf16 x) {
  return __uint_as_float(unsigned(x.bits) << 16);
}

template <typename T> __device__ void store(float* out, T x) { *out = x; }
template <typename T> __device__ void store(double* out, T x) { *out = x; }
template <typename T> __device__ void store(unsigned char* out, T x) { *out = x != 0; }
template <typename T> __device__ void store(Bf16* out, T wide) {
  float x = wide;
  unsigned bits = __float_as_uint(x);
  if (x != x) out->bits = bits >> 16 | 0x40;
  else out->bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// NaN if one is, and 0.0 is larger than -0.0.
template <typename T> __device__ T larger(T x, T y) {
  return x > y || x != x || (x == y && !signbit(x)) ? x : y;
}
template <typename T> __device__ T smaller(T x, T y) {
  return x < y || x != x || (x == y && signbit(x)) ? x : y;
}
"""


def mapped(
    fields: dict[str, Any],
    sizes: Sequence[int],
    dtypes: Sequence[str],
    size: int,
    out: str,
    device: CudaDevice,
) -> Kernel:
    """A function of each element, as ``bundle.pointwise`` describes it.

    Args:
      fields: its description.
      sizes, dtypes: of the operands, in elements: those of the result, or one.
      size, out: of the result.
      device: target.
    """
    name = fields["function"]
    formula = _FORMULAS.get(name) or _power(fields["exponent"])
    number = "double" if "float64" in (*dtypes, out) else "float"
    operands = list(zip("xyz", dtypes, sizes, strict=False))
    params = ", ".join(f"const {_TYPES[d]}* of_{x}" for x, d, _ in operands)
    places = [
        "i" if count == size else "0" if count == 1 else f"i / {inner} % {count}"
        for count, inner in zip(sizes, fields["inners"], strict=True)
    ]
    loads = "\n".join(
        f"    T {x} = load<T>(of_{x}[{place}]);"
        for (x, _, _), place in zip(operands, places, strict=True)
    )
    source = f"""\
// {name} of each element | {", ".join(dtypes)} to {out}
{_COMMON}
using T = {number};

extern "C" __global__ void __launch_bounds__({_THREADS})
pointwise({params}, {_TYPES[out]}* out, long long size) {{
  long long step = (long long)gridDim.x * {_THREADS};
  for (long long i = blockIdx.x * (long long){_THREADS} + threadIdx.x; i < size;
       i += step) {{
{loads}
    store(out + i, T({formula}));
  }}
}}
"""
    blocks = min(-(-size // _THREADS), _MOST_BLOCKS)
    return _kernel(source, blocks, len(operands) + 1, [size], device)


def reduced(fields: dict[str, Any], dtype: str, out: str, device: CudaDevice) -> Kernel:
    """A reduction, as ``bundle.pointwise`` describes it: a block for each result."""
    number = "double" if dtype == "float64" else "float"
    add = {"sum": "x + y", "max": "larger(x, y)", "min": "smaller(x, y)"}
    source = f"""\
// {fields["function"]} | {dtype} to {out}
{_COMMON}
using T = {number};

__device__ T join(T x, T y) {{ return {add[fields["function"]]}; }}

extern "C" __global__ void __launch_bounds__({_THREADS})
pointwise(const {_TYPES[dtype]}* in, {_TYPES[out]}* out, long long results,
          long long reduced, long long inner) {{
  __shared__ T parts[{_THREADS}];
  long long threads = reduced < {_THREADS} ? reduced : {_THREADS};
  for (long long r = blockIdx.x; r < results; r += gridDim.x) {{
    const {_TYPES[dtype]}* first = in + r / inner * reduced * inner + r % inner;
    if (threadIdx.x < threads) {{
      T total = load<T>(first[threadIdx.x * inner]);
      for (long long j = threadIdx.x + threads; j < reduced; j += threads)
        total = join(total, load<T>(first[j * inner]));
      parts[threadIdx.x] = total;
    }}
    __syncthreads();
    if (threadIdx.x == 0) {{
      T total = parts[0];
      for (int i = 1; i < threads; ++i) total = join(total, parts[i]);
      store(out + r, total);
    }}
    __syncthreads();
  }}
}}
"""
    results = fields["outer"] * fields["inner"]
    sizes = [results, fields["reduced"], fields["inner"]]
    return _kernel(source, min(results, _MOST_BLOCKS), 2, sizes, device)


def moved(fields: dict[str, Any], itemsize: int, device: CudaDevice) -> Kernel:
    """A strided copy of elements, as ``bundle.moves.Move.fields`` describes it."""
    names = ("counts", "from_strides", "to_strides")
    dims = list(zip(*(fields[name] for name in names), strict=True))
    dims.append((fields["run"] // itemsize, itemsize, itemsize))
    params = "".join(
        f", long long n{i}, long long from{i}, long long to{i}"
        for i in range(len(dims))
    )
    walk = "\n".join(
        f"    from += rest % n{i} * from{i}, to += rest % n{i} * to{i}, rest /= n{i};"
        for i in reversed(range(len(dims)))
    )
    element = {
        1: "unsigned char",
        2: "unsigned short",
        4: "unsigned",
        8: "uint2",
        16: "ulonglong2",
    }[itemsize]
    source = f"""\
// copy of elements of {itemsize} bytes | {len(dims)} dimensions
extern "C" __global__ void __launch_bounds__({_THREADS})
pointwise(const {element}* in, {element}* out, long long size, long long from0th,
          long long to0th{params}) {{
  long long step = (long long)gridDim.x * {_THREADS};
  for (long long i = blockIdx.x * (long long){_THREADS} + threadIdx.x; i < size;
       i += step) {{
    long long rest = i, from = from0th, to = to0th;
{walk}
    out[to] = in[from];
  }}
}}
"""
    size = math.prod(count for count, _, _ in dims)
    numbers = [size]
    numbers += [fields[name] // itemsize for name in ("from_offset", "to_offset")]
    for count, read, written in dims:
        numbers += [count, read // itemsize, written // itemsize]
    blocks = min(-(-size // _THREADS), _MOST_BLOCKS)
    return _kernel(source, blocks, 2, numbers, device)


def _power(exponent: int) -> str:
    if exponent == 0:
        return "T(1)"
    product = " * ".join(["x"] * abs(exponent))
    return product if exponent > 0 else f"1 / ({product})"


def _kernel(
    source: str, blocks: int, arrays: int, sizes: list[int], device: CudaDevice
) -> Kernel:
    return Kernel(
        entry="pointwise",
        source=source,
        headers=(),
        arch=device.arch,
        options=("--fmad=false",),
        grid=(blocks, 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=0,
        params=(
            *(Pointer(operand=i) for i in range(arrays)),
            *(Scalar(value=size, dtype="int64") for size in sizes),
        ),
    )
