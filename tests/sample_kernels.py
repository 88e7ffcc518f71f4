"""Small kernels that the tests of the runtime share."""

from __future__ import annotations

import dataclasses

from tracea_jax.emit.kernel import (
    Im2colMap,
    Kernel,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
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


SCALARS = """extern "C" __global__ void
scalars(float* out, signed char a, unsigned char b, short c, unsigned short d, int e,
        unsigned f, long long g, unsigned long long h, unsigned short half,
        unsigned short bfloat, float k, double l) {
  float values[] = {float(a), float(b), float(c), float(d), float(e), float(f),
                    float(g), float(h), float(half), float(bfloat), k, float(l)};
  for (int i = 0; i < 12; ++i) out[i] = values[i];
}
"""
# By dtype; of the last ones of 16 bits the kernel writes the bits, as a number.
SCALAR_VALUES: dict[str, float] = {
    "int8": -100,
    "uint8": 200,
    "int16": -30_000,
    "uint16": 60_000,
    "int32": -(2**31),
    "uint32": 2**31,
    "int64": -(2**62),
    "uint64": 2**63,
    "float16": 1.5,
    "bfloat16": -1.5,
    "float32": -0.375,
    "float64": 2.0**-100,
}
SCALARS_WRITTEN = [*SCALAR_VALUES.values()]
SCALARS_WRITTEN[8:10] = [0x3E00, 0xBFC0]


def scalars() -> Kernel:
    """Writes a scalar of every type as a float."""
    values = SCALAR_VALUES.items()
    return dataclasses.replace(
        scale(),
        entry="scalars",
        source=SCALARS,
        headers=(),
        grid=(1, 1, 1),
        block=(1, 1, 1),
        params=(
            Pointer(operand=0),
            *(Scalar(value=value, dtype=dtype) for dtype, value in values),
        ),
    )


IM2COL = """struct alignas(64) TensorMap { unsigned long long opaque[16]; };
extern "C" __global__ void __launch_bounds__(128)
im2col(const __grid_constant__ TensorMap map, float* out, int w, int h, int n,
       unsigned short tap_w, unsigned short tap_h) {
  __shared__ alignas(128) float tile[128];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned tile_at = __cvta_generic_to_shared(tile);
  unsigned barrier_at = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;"
                 ::"r"(barrier_at) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
        ::"r"(tile_at), "l"(&map), "r"(0), "r"(w), "r"(h), "r"(n), "r"(barrier_at),
        "h"(tap_w), "h"(tap_h) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        "\\nselp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(barrier_at) : "memory");
  }
  out[threadIdx.x] = tile[threadIdx.x];
}
"""
IMAGES = (2, 5, 6, 8)  # images, rows, columns and channels, of float32


def im2col(first: tuple[int, int, int], tap: tuple[int, int], stride: int) -> Kernel:
    """Copies 16 pixels of a 3x3 filter with a padding of 1 in one go.

    Args:
      first: column, row and image of the first position; the padding is at -1.
      tap: column and row of the filter's tap.
      stride: of the positions.
    """
    images, rows, columns, channels = IMAGES
    strides = (4 * channels, 4 * channels * columns, 4 * channels * columns * rows)
    map = Im2colMap(
        operand=0,
        dtype="float32",
        dims=(channels, columns, rows, images),
        strides=strides,
        lower=(-1, -1),
        upper=(-1, -1),
        channels=channels,
        pixels=16,
        element_strides=(1, stride, stride, 1),
        swizzle=TensorMapSwizzle.NONE,
    )
    return dataclasses.replace(
        scale(),
        entry="im2col",
        source=IM2COL,
        headers=(),
        grid=(1, 1, 1),
        params=(
            map,
            Pointer(operand=1),
            *(Scalar(value=position) for position in first),
            *(Scalar(value=offset, dtype="uint16") for offset in tap),
        ),
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
