"""relayout as text: matrices in rows of whole lines, or in three bfloat16 parts."""

from __future__ import annotations

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE

LINE_BYTES = 128  # rows of the result are multiples: boxes of them lie in whole lines
_CHUNK_BYTES = 16
MOST_ELEMENTS = 2**31  # their counts stay in 32 bits, filled up and rounded to grids

_THREADS = 256
_CHUNKS = 4  # of each thread: loads in flight, if there are threads enough
_MANY_CHUNKS = 1 << 20


def stride(columns: int, dtype: str) -> int:
    """Elements of a row of the result."""
    unit = LINE_BYTES // ITEMSIZE[dtype]
    return -(-columns // unit) * unit


def kernel(
    rows: int, columns: int, dtype: str, device: CudaDevice, *, split: bool = False
) -> Kernel:
    """(rows, columns) to (rows, stride(columns)), of the same elements.

    Args:
      split: (rows, columns) of float32 to (3, rows, stride(columns)) of bfloat16, whose
        sum over the parts they are.
    """
    out = "bfloat16" if split else dtype
    chunks = rows * stride(columns, out) * ITEMSIZE[out] // _CHUNK_BYTES
    itemsize = ITEMSIZE[dtype]
    each = _CHUNKS if chunks >= _MANY_CHUNKS else 1
    entry = f"relayout_b{8 * itemsize}" + "_split" * split + f"_{each}"
    return Kernel(
        entry=entry,
        source=_source(entry, itemsize, split, each),
        headers=sources.headers("relayout.cuh"),
        arch=device.arch,
        grid=(-(-chunks // (_THREADS * each)), 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=0,
        params=(
            Pointer(operand=0),
            Pointer(operand=1),
            Scalar(value=rows),
            Scalar(value=columns),
            Scalar(value=stride(columns, out)),
        ),
    )


def _source(entry: str, itemsize: int, split: bool, chunks: int) -> str:
    return f"""\
// relayout | {itemsize}-byte elements{", split" * split}
#include "relayout.cuh"

namespace {{
struct Traits {{
  static constexpr unsigned kElementBytes = {itemsize}, kThreads = {_THREADS}, \
kChunks = {chunks};
  static constexpr bool kSplits = {"true" if split else "false"};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({_THREADS})
{entry}(const void* in, void* out, unsigned rows, unsigned columns, unsigned stride) {{
  tracea::Relayout<Traits>({{in, out, rows, columns, stride}}).run();
}}
"""
