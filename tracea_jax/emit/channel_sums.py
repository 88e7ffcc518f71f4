"""channel_sums as text: partial sums of the rows of each block."""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import ChannelSumsProblem

THREADS = 256
_POINTERS = (
    *("x", "dy", "more", "y", "center", "factor", "shift"),
    *("dz", "parts"),
)
PACK_BYTES = 16
# The largest f32 that rounds to zero, to even: half of the smallest positive number.
_LEAST = {"float32": "0.0f", "bfloat16": "0x1p-134f", "float16": "0x1p-25f"}
_MOST_LANES = 64
_FEWEST_LANES = 16  # where a row has more packs than a block: whole sectors of memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Partition of a matrix: see ``kernels/cuda/tile/block_columns.cuh``.

    Attributes:
      lanes: packs of channels that a block has of a row.
      columns, blocks: of the grid: blocks side by side, and those that share the rows.
    """

    lanes: int
    columns: int
    blocks: int


def pack(dtype: str) -> int:
    """Channels of a pack."""
    return {"float32": 4}.get(dtype, 8)


def lanes(problem: ChannelSumsProblem) -> int:
    """Packs of channels that a block has of a row."""
    packs = problem.channels // pack(problem.dtype)
    if packs <= _MOST_LANES:
        return packs
    fitting = range(_MOST_LANES, _FEWEST_LANES - 1, -1)
    return next((n for n in fitting if packs % n == 0), _MOST_LANES)


def columns(problem: ChannelSumsProblem) -> int:
    """Blocks side by side: y of the grid."""
    return -(-problem.channels // (pack(problem.dtype) * lanes(problem)))


def places(
    problem: ChannelSumsProblem, device: CudaDevice, *, blocks: int, unroll: int
) -> Places:
    """The cut for a problem.

    Args:
      problem: its channels are a multiple of a pack's.
      device: its multiprocessors.
      blocks: of each multiprocessor, if there are rows enough.
      unroll: rows of a thread in flight.
    """
    across, side_by_side = lanes(problem), columns(problem)
    tiles = -(-problem.rows // (THREADS // across * unroll))
    most = max(1, device.sm_count * blocks // side_by_side)
    turns = -(-tiles // most)
    return Places(lanes=across, columns=side_by_side, blocks=-(-tiles // turns))


def kernel(
    problem: ChannelSumsProblem, device: CudaDevice, *, blocks: int, unroll: int
) -> Kernel:
    """The problem's operands to parts, (blocks, 2, channels), and dz if it is kept."""
    p, cut = problem, places(problem, device, blocks=blocks, unroll=unroll)
    relu = "" if p.relu == "none" else f"_relu_{p.relu}{p.cotangents}"
    entry = f"channel_sums_{p.kind}{relu}_{SHORT[p.dtype]}_{cut.lanes}x{unroll}"
    buffers = {name: i for i, name in enumerate((*p.operands, "parts", "dz"))}
    if not p.keeps:
        del buffers["dz"]
    return Kernel(
        entry=entry,
        source=_source(p, entry, cut.lanes, unroll),
        headers=sources.headers("channel_sums.cuh"),
        arch=device.arch,
        grid=(cut.blocks, cut.columns, 1),
        block=(THREADS, 1, 1),
        smem_bytes=0,
        params=(
            *(Pointer(operand=buffers.get(name, -1)) for name in _POINTERS),
            Scalar(value=p.rows),
            Scalar(value=p.channels),
        ),
    )


def _source(p: ChannelSumsProblem, entry: str, lanes: int, unroll: int) -> str:
    gradients = p.cotangents if p.is_gradient else 0
    return f"""\
// {p.op} | {p.kind} {p.dtype}, {gradients} of dy, relu {p.relu}
#include "channel_sums.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.dtype]};
  static constexpr int kThreads = {THREADS}, kLanes = {lanes}, kUnroll = {unroll}, \
kGradients = {gradients};
  static constexpr auto kRelu = tracea::ReluOf::k{p.relu.title()};
  static constexpr bool kKeeps = {cxx(p.keeps)};
  static constexpr float kLeast = {_LEAST[p.dtype]};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({THREADS})
{entry}(const void* x, const void* dy, const void* more, const void* y,
    const float* center, const float* factor, const float* shift, void* dz,
    float* parts, int rows, int channels) {{
  tracea::channel_sums<Traits>(
      {{x, dy, more, y, center, factor, shift, dz, parts}}, rows, channels);
}}
"""
