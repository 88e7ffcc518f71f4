"""sum_of_parts as text: partial sums added in a fixed order, and rounded."""

from __future__ import annotations

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar

_WARP, _MOST_WARPS = 32, 8


def kernel(parts: int, count: int, dtype: str, device: CudaDevice) -> Kernel:
    """(parts, count) of float32 to (count,) of a dtype; ``count`` must be even."""
    vector = 4 if count % 4 == 0 else 2
    warps = next(w for w in (1, 2, 4, _MOST_WARPS) if w >= min(parts, _MOST_WARPS))
    entry = f"sum_of_parts_{SHORT[dtype]}_v{vector}_w{warps}"
    source = f"""\
// sum_of_parts | {dtype}, {vector} sums a thread, {warps} warps
#include "sum_of_parts.cuh"

extern "C" __global__ void __launch_bounds__({_WARP * warps})
{entry}(const float* in, {CXX_TYPE[dtype]}* out, int parts, long long count) {{
  tracea::sum_of_parts<{CXX_TYPE[dtype]}, {vector}, {warps}>(in, out, parts, count);
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers("sum_of_parts.cuh"),
        arch=device.arch,
        grid=(-(-count // (_WARP * vector)), 1, 1),
        block=(_WARP * warps, 1, 1),
        smem_bytes=0,
        params=(
            Pointer(operand=0),
            Pointer(operand=1),
            Scalar(value=parts),
            Scalar(value=count, dtype="int64"),
        ),
    )
