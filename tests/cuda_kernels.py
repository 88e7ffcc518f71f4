"""CUDA kernels as users write them, which the tests of ``cuda_kernel`` share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tracea_jax as tracea

SOFTMAX = """
#ifndef BLOCK
#define BLOCK 256
#endif
// The sum, or the largest, of a value of each thread of the block.
template <typename F> __device__ float all(float value, F join) {
  __shared__ float parts[BLOCK];
  __syncthreads();
  parts[threadIdx.x] = value;
  for (int n = BLOCK / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x >= n) continue;
    parts[threadIdx.x] = join(parts[threadIdx.x], parts[threadIdx.x + n]);
  }
  __syncthreads();
  return parts[0];
}
extern "C" __global__ void softmax(const float* x, float* y, int columns) {
  x += blockIdx.x * (long long)columns, y += blockIdx.x * (long long)columns;
  float top = __int_as_float(0xff800000), sum = 0;
  for (int c = threadIdx.x; c < columns; c += BLOCK) top = fmaxf(top, x[c]);
  top = all(top, [](float a, float b) { return fmaxf(a, b); });
  for (int c = threadIdx.x; c < columns; c += BLOCK) sum += expf(x[c] - top);
  sum = all(sum, [](float a, float b) { return a + b; });
  for (int c = threadIdx.x; c < columns; c += BLOCK) y[c] = expf(x[c] - top) / sum;
}
extern "C" __global__ void backward(const float* y, const float* dy, float* dx,
                                    int columns) {
  const long long start = blockIdx.x * (long long)columns;
  float sum = 0;
  for (int c = threadIdx.x; c < columns; c += BLOCK)
    sum += y[start + c] * dy[start + c];
  sum = all(sum, [](float a, float b) { return a + b; });
  for (int c = threadIdx.x; c < columns; c += BLOCK)
    dx[start + c] = y[start + c] * (dy[start + c] - sum);
}
"""
ROWS: dict[str, Any] = {
    "grid": lambda y, columns: y.size // max(1, columns),
    "block": lambda BLOCK=256: BLOCK,
    "scalars": {"columns": lambda y: y.shape[-1]},
    "vmap": "leading",
}


def softmax_gradient(y, dy):
    return y * (dy - jnp.sum(y * dy, -1, keepdims=True))


BACKWARD = tracea.cuda_kernel(SOFTMAX, "backward", reference=softmax_gradient, **ROWS)
SOFTMAX_OP = tracea.cuda_kernel(
    SOFTMAX,
    "softmax",
    reference=jax.nn.softmax,
    backward=lambda x, y, dy: BACKWARD(y, dy),
    **ROWS,
)
TUNED = SOFTMAX_OP.space({"BLOCK": (128, 32, 64, 256, 512, 1024)})

AXPY = """
extern "C" __global__ void axpy(const float* x, const float* y, float* z, float a,
                                long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) z[i] = a * x[i] + y[i];
}
"""
AXPY_OP = tracea.cuda_kernel(
    AXPY,
    scalars={"n": lambda x: x.size},
    reference=lambda x, y, *, a: a * x + y,
)

Struct = jax.ShapeDtypeStruct


def call_of(op: Any, *operands: Any, config: tuple = (), **numbers: Any) -> Any:
    """The call of the op: a ``Kernel`` or ``Steps``."""
    given = tuple((name, repr(value)) for name, value in numbers.items())
    launcher = op.definition.launcher(operands, given)
    return launcher.call(config or launcher.configs[0], "sm_90a")


def program_for_a_gpu(f: Any, *args: Any) -> str:
    with tracea.options(device="H200"):
        return jax.export.export(jax.jit(f), platforms=["cuda"])(*args).mlir_module()
