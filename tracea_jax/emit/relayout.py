"""relayout as text: matrices in rows of whole lines, or in three bfloat16 parts."""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
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
    matrices: Sequence[tuple[int, int]],
    dtype: str,
    device: CudaDevice,
    *,
    split: bool = False,
) -> Kernel:
    """(rows, columns) to (rows, stride(columns)), of the same elements.

    Args:
      matrices: rows and columns of one or two, which are as many operands and results.
      split: (rows, columns) of float32 to (3, rows, stride(columns)) of bfloat16, whose
        sum over the parts they are.
    """
    out = "bfloat16" if split else dtype
    sizes = [(rows, columns, stride(columns, out)) for rows, columns in matrices]
    chunks = [rows * row * ITEMSIZE[out] // _CHUNK_BYTES for rows, _, row in sizes]
    each = _CHUNKS if sum(chunks) >= _MANY_CHUNKS else 1
    itemsize, count = ITEMSIZE[dtype], len(sizes)
    entry = f"relayout_b{8 * itemsize}" + "_split" * split + f"_{count}x{each}"
    params: list[Param] = []
    for i, size in enumerate(sizes):
        params += [Pointer(operand=i), Pointer(operand=count + i)]
        params += [Scalar(value=extent, dtype="uint32") for extent in size]
    return Kernel(
        entry=entry,
        source=_source(entry, itemsize, split, count, each),
        headers=sources.headers("relayout.cuh"),
        arch=device.arch,
        grid=(sum(-(-n // (_THREADS * each)) for n in chunks), 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=0,
        params=tuple(params),
    )


def _source(entry: str, itemsize: int, split: bool, count: int, chunks: int) -> str:
    parameters = ", ".join(
        f"const void* in{i}, void* out{i}, unsigned rows{i}, unsigned columns{i}, "
        f"unsigned stride{i}"
        for i in range(count)
    )
    arguments = ", ".join(
        f"{{in{i}, out{i}, rows{i}, columns{i}, stride{i}}}" for i in range(count)
    )
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
{entry}({parameters}) {{
  tracea::relayout<Traits>({arguments});
}}
"""
