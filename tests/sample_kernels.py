"""Small kernels that the tests of the runtime share."""

from __future__ import annotations

from tracea_jax.emit.kernel import Kernel, Pointer, Scalar, TensorMap, TensorMapSwizzle
from tracea_jax.runtime.nvrtc import Cubin

SCALE = """#include "scale.cuh"
extern "C" __global__ void __launch_bounds__(128)
scale(const float* in, float* out, int n, int by) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) out[i] = scaled(in[i], by);
}
"""
SCALE_HEADER = """#pragma once
__device__ inline float scaled(float x, int by) { return x * static_cast<float>(by); }
"""


def scale(n: int = 1000, by: int = 3) -> Kernel:
    """out[i] = in[i] * by, for n floats."""
    return Kernel(
        entry="scale",
        source=SCALE,
        headers=(("scale.cuh", SCALE_HEADER),),
        arch="sm_90a",
        grid=(-(-n // 128), 1, 1),
        block=(128, 1, 1),
        smem_bytes=0,
        params=(
            Pointer(operand=0),
            Pointer(operand=1),
            Scalar(value=n),
            Scalar(value=by),
        ),
    )


def tiled_map(operand: int) -> TensorMap:
    """Boxes of 64x32 bfloat16 from a row-major (100, 256) array."""
    return TensorMap(
        operand=operand,
        dtype="bfloat16",
        dims=(256, 100),
        strides=(512,),
        box=(64, 32),
        swizzle=TensorMapSwizzle.B128,
    )


# ---- compiled code that no compiler is needed for ------------------------------------

KEY = "0123456789abcdef" * 4


def elf(body: bytes = b"") -> bytes:
    """The least that passes for a cubin: a header and one empty section."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    section = 64 + len(body)
    header[40:48] = section.to_bytes(8, "little")
    header[58:60] = (64).to_bytes(2, "little")
    header[60:62] = (1).to_bytes(2, "little")
    return bytes(header) + body + bytes(64)


def cubin(key: str = KEY, image: bytes | None = None) -> Cubin:
    return Cubin(
        key=key,
        arch="sm_90a",
        entry="scale",
        image=elf() if image is None else image,
        registers=0,
        stack_bytes=0,
        spill_bytes=0,
        smem_static_bytes=0,
        warnings=(),
        log="",
        compile_s=0.0,
    )
