"""max_pool as text."""

from __future__ import annotations

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE, MaxPoolProblem

_PACK_BYTES = 16


def pack(dtype: str) -> int:
    """Channels that a thread has."""
    return _PACK_BYTES // ITEMSIZE[dtype]


def patches(problem: MaxPoolProblem) -> tuple[int, int]:
    """Patches of strides x strides pixels, down and across, with the padding before."""
    p = problem
    sizes = zip((p.height, p.width), p.padding, p.strides, strict=True)
    down, across = (-(-(n + before) // s) for n, (before, _), s in sizes)
    return down, across


def kernel(problem: MaxPoolProblem, device: CudaDevice, *, threads: int) -> Kernel:
    """x to y, or x and dy to dx."""
    p = problem
    is_forward = p.direction == "forward"
    down, across = p.out_size if is_forward else patches(p)
    count = p.batch * down * across * (p.channels // pack(p.dtype))
    windows = "_".join(f"{k}s{s}p{b}" for k, s, (b, _) in _axes(p))
    entry = f"max_pool_{p.direction}_{SHORT[p.dtype]}_{windows}_{threads}"
    sizes = (p.height, p.width, *p.out_size, p.channels, *patches(p))
    return Kernel(
        entry=entry,
        source=_source(p, entry, threads),
        headers=sources.headers("max_pool.cuh"),
        arch=device.arch,
        grid=(-(-count // threads), 1, 1),
        block=(threads, 1, 1),
        smem_bytes=0,
        params=(
            *(Pointer(operand=i) for i in range(2 if is_forward else 3)),
            *(Scalar(value=n) for n in sizes),
            Scalar(value=count, dtype="int64"),
        ),
    )


def _axes(p: MaxPoolProblem) -> zip[tuple[int, int, tuple[int, int]]]:
    return zip(p.kernel, p.strides, p.padding, strict=True)


def _source(p: MaxPoolProblem, entry: str, threads: int) -> str:
    arrays = ("x", "y") if p.direction == "forward" else ("x", "dy", "dx")
    element = CXX_TYPE[p.dtype]
    parameters = ", ".join(
        f"{'const ' * (name != arrays[-1])}{element}* {name}" for name in arrays
    )
    (kernel_h, stride_h, (pad_h, _)), (kernel_w, stride_w, (pad_w, _)) = _axes(p)
    return f"""\
// max_pool | {p.direction} {p.dtype}
#include "max_pool.cuh"

namespace {{
struct Traits {{
  using Element = {element};
  static constexpr int kKernelH = {kernel_h}, kKernelW = {kernel_w}, \
kStrideH = {stride_h}, kStrideW = {stride_w}, kPadH = {pad_h}, kPadW = {pad_w};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({threads})
{entry}({parameters}, int height, int width, int out_height, int out_width,
    int channels, int patches_down, int patches_across, long long threads) {{
  const tracea::MaxPoolParams p{{height, width, out_height, out_width, channels,
                                patches_down, patches_across, threads}};
  tracea::MaxPool<Traits>::{p.direction}({", ".join(arrays)}, p);
}}
"""
