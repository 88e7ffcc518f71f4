"""attention_sm90 as text and numbers: its config, and the kernel of a problem.

A config holds the free choices; shared memory, registers, the grid and the order of
tiles follow from it and the problem, by the pure functions here. The device code
asserts that it arrives at the same numbers. Caller: ``variants.attention_sm90``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.problem import AttentionProblem

DTYPES = {"bfloat16": ("tracea::bf16", "bf16"), "float16": ("tracea::f16", "f16")}
ROWS = 64  # queries of a consumer; also columns of a slab
WARPGROUP = 128
WARP_ROWS = 16  # of the result, that a warp stores
SCHEDULES = ("drawn", "static", "grid")
_ITEMSIZE = 2
_ROW_BYTES = 128  # of a slab
_SECTION_BYTES = 32 << 20  # of keys and values that stay in L2 beside all else
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
# setmaxnreg of the producer and of each consumer, by the number of consumers.
_REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSm90Config:
    """The free choices of attention_sm90.

    Attributes:
      tile_q: queries of a tile, 64 for each consumer.
      tile_kv: keys of a block.
      stages: blocks of keys, and of values, that shared memory holds.
      ping_pong: consumers multiply in turns.
      overlap: a consumer multiplies the weights of one block and the values while it
        computes the weights of the next.
      schedule: who computes a tile. "drawn": blocks draw tiles from a counter;
        "static": blocks take every so many tiles; "grid": a block for each tile.
    """

    tile_q: int
    tile_kv: int
    stages: int = 2
    ping_pong: bool = True
    overlap: bool = True
    schedule: str = "drawn"

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_q // ROWS

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    def __str__(self) -> str:
        how = " pp" * self.ping_pong + " ov" * self.overlap
        return f"{self.tile_q}x{self.tile_kv} s{self.stages}{how} {self.schedule}"


def slabs(problem: AttentionProblem) -> int:
    """Slabs of 64 columns that a head is stored in."""
    return -(-problem.head_dim // ROWS)


def smem_bytes(
    problem: AttentionProblem, config: AttentionSm90Config, *, in_place: bool
) -> Any:
    """Shared memory of one block.

    Args:
      problem: the problem.
      config: the config.
      in_place: whether results are staged where the queries were.
    """
    tile = slabs(problem) * config.tile_q * _ROW_BYTES
    ring = 2 * config.stages * slabs(problem) * config.tile_kv * _ROW_BYTES
    staging = 0 if in_place else tile
    period = SWIZZLE_128B.period_bytes
    return tile + ring + staging + period  # the last for barriers, and one byte


def stages_in_place(
    problem: AttentionProblem, config: AttentionSm90Config, limit_bytes: int
) -> bool:
    """Whether there is no room for results beside the queries of the next tile."""
    return bool(smem_bytes(problem, config, in_place=False) > limit_bytes)


def window(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """(left, right): query i sees keys i - left .. i + right; None for no limit.

    A side that excludes no key is dropped.
    """
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left >= problem.q_len - 1:
        left = None
    if right is not None and right >= problem.kv_len - 1:
        right = None
    return left, right


def masks(problem: AttentionProblem) -> bool:
    """Whether more than the last block of keys of a tile may be partial."""
    return window(problem) != (None, None) or problem.kv_lengths


def tiles_q(problem: AttentionProblem, config: AttentionSm90Config) -> int:
    """Tiles of queries of one head."""
    return -(-problem.q_len // config.tile_q)


def tile_count(problem: AttentionProblem, config: AttentionSm90Config) -> int:
    """Tiles of queries of all heads of all examples."""
    return tiles_q(problem, config) * problem.heads * problem.batch


def scores(problem: AttentionProblem, config: AttentionSm90Config) -> int:
    """Scores that are computed for one head: all of every block that a tile sees.

    Lengths are known on the device alone; here they count as whole.
    """
    left, right = window(problem)
    every = problem.kv_len
    keys = KeyInterval(kv_len=every, limit=every, left=left, right=right)
    seen = (
        keys.blocks(q, min(q + config.tile_q, problem.q_len) - 1, config.tile_kv).count
        for q in range(0, problem.q_len, config.tile_q)
    )
    return sum(seen) * config.tile_q * config.tile_kv


def section(problem: AttentionProblem) -> int:
    """Heads whose tiles are neighbours in the order of tiles.

    Heads that share keys lie side by side, and their keys count once.
    """
    group = problem.heads // problem.kv_heads
    bytes_of_keys = 2 * problem.kv_len * problem.head_dim * _ITEMSIZE
    fitting = max(1, _SECTION_BYTES // bytes_of_keys) * group
    return min(fitting, problem.heads * problem.batch)


def grid(problem: AttentionProblem, config: AttentionSm90Config, sm_count: int) -> int:
    """Blocks of the launch."""
    tiles = tile_count(problem, config)
    return tiles if config.schedule == "grid" else min(tiles, sm_count)


def draws(config: AttentionSm90Config) -> bool:
    """Whether the kernel needs a counter."""
    return config.schedule == "drawn"


def kernel(
    problem: AttentionProblem, config: AttentionSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes a forward problem with this config.

    Operands are q, k, v, then the lengths that the problem has, and a counter if tiles
    are drawn; results are o, the log-sum-exp if it is saved, and the counter again.
    What only the launch needs stays out of the source: one cubin serves all lengths and
    numbers of heads.
    """
    t = problem.dtype
    scores = Wgmma(n=config.tile_kv, lhs=t, rhs=t)
    sums = Wgmma(n=problem.head_dim, lhs=t, rhs=t, lhs_in_registers=True)
    generated = {w.header_name: w.header for w in (scores, sums)}
    headers = (*sources.headers("attention_sm90.cuh"), *generated.items())
    limit = device.smem_per_block_bytes
    in_place = stages_in_place(problem, config, limit)
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, scores, sums, in_place),
        headers=tuple(sorted(headers)),
        arch=device.arch,
        grid=(grid(problem, config, device.sm_count), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=int(smem_bytes(problem, config, in_place=in_place)),
        params=_params(problem, config),
    )


def entry_name(problem: AttentionProblem, config: AttentionSm90Config) -> str:
    """What the kernel computes and how, readable in a profiler; free of lengths."""
    left, right = window(problem)
    parts = (
        DTYPES[problem.dtype][1],
        f"d{problem.head_dim}",
        "left" if left is not None else "",
        "right" if right is not None else "",
        "qlen" if problem.q_lengths else "",
        "kvlen" if problem.kv_lengths else "",
        "lse" if problem.saves_lse else "",
    )
    choices = str(config).replace(" ", "_")
    return "_".join(("attention_sm90", *filter(None, parts), choices))


def _params(
    problem: AttentionProblem, config: AttentionSm90Config
) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_source``."""
    p = problem
    operands = ["q", "k", "v"]
    operands += ["q_lengths"] * p.q_lengths + ["kv_lengths"] * p.kv_lengths
    operands += ["counter"] * draws(config)
    number = {name: i for i, name in enumerate(operands)}
    out = len(operands)
    left, right = window(p)
    queries, keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    numbers = (
        *(p.batch, p.q_len, p.kv_len, p.heads, p.heads // p.kv_heads),
        *(left or 0, right or 0, section(p)),
    )
    return (
        _map(p, 0, queries, config.tile_q),
        _map(p, 1, keys, config.tile_kv),
        _map(p, 2, keys, config.tile_kv),
        _map(p, out, queries, WARP_ROWS),
        Pointer(operand=out + 1 if p.saves_lse else -1),
        *(
            Pointer(operand=number.get(name, -1))
            for name in ("counter", "q_lengths", "kv_lengths")
        ),
        *(Scalar(value=value) for value in numbers),
        Scalar(value=p.scale * math.log2(math.e), dtype="float32"),
    )


def _map(
    problem: AttentionProblem, operand: int, shape: tuple[int, int], rows: int
) -> TensorMap:
    """Boxes of ``rows`` queries or keys of a slab of one head of one example."""
    (length, heads), dim = shape, problem.head_dim
    row = dim * _ITEMSIZE
    return TensorMap(
        operand=operand,
        dtype=problem.dtype,
        dims=(dim, length, heads, problem.batch),
        strides=(heads * row, row, length * heads * row),
        box=(ROWS, rows, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _source(
    problem: AttentionProblem,
    config: AttentionSm90Config,
    scores: Wgmma,
    sums: Wgmma,
    in_place: bool,
) -> str:
    """The translation unit: Traits and one entry."""
    left, right = window(problem)
    producer, consumer = _REGISTERS[config.consumers]
    ring = Ring(stages=config.stages)
    scalars = "batch q_len kv_len heads group left right section".split()
    parameters = [f"{_MAP} {name}" for name in "qkvo"]
    parameters += ["float* lse", "unsigned* counter"]
    parameters += ["const int* q_lengths", "const int* kv_lengths"]
    parameters += [*(f"int {name}" for name in scalars), "float scale_log2"]
    arguments = "&q, &k, &v, &o, lse, counter, q_lengths, kv_lengths"
    return f"""\
// attention_sm90 | {problem.dtype} dim {problem.head_dim} | {config}
#include "attention_sm90.cuh"
#include "{scores.header_name}"
#include "{sums.header_name}"

namespace {{
struct Traits {{
  using Element = {DTYPES[problem.dtype][0]};
  using Scores = tracea::{scores.type_name}<0, 0>;
  using Sums = tracea::{sums.type_name}<0, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr int kHeadDim = {problem.head_dim}, kSlabs = {slabs(problem)};
  static constexpr int kTileQ = {config.tile_q}, kTileKv = {config.tile_kv}, \
kStages = {config.stages};
  static constexpr bool kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)}, kQLengths = {cxx(problem.q_lengths)}, \
kKvLengths = {cxx(problem.kv_lengths)};
  static constexpr bool kSavesLse = {cxx(problem.saves_lse)}, \
kPingPong = {cxx(config.ping_pong)}, kOverlaps = {cxx(config.overlap)}, \
kDraws = {cxx(draws(config))}, \
kStagesInPlace = {cxx(in_place)};
  static constexpr unsigned kFirstEmptyParity = {ring.producer_parity(0)};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kSmemBytes = \
{int(smem_bytes(problem, config, in_place=in_place))};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({", ".join(parameters)}) {{
  tracea::attention_sm90<Traits>({{{arguments}, {", ".join(scalars)}, scale_log2}});
}}
"""
