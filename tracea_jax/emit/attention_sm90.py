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
from tracea_jax.emit import attention_rules as rules
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
BIAS_DTYPES = ("bfloat16", "float16", "float32")
ROWS = 64  # queries of a consumer; also columns of a slab
WARPGROUP = 128
WARP_ROWS = 16  # of the result, that a warp stores
SCHEDULES = ("drawn", "static", "grid")
_ITEMSIZE = 2
_ROW_BYTES = 128  # of a slab
_SECTION_BYTES = 32 << 20  # of keys and values that stay in L2 beside all else
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
WORDS_OF_BLOCK = 4  # of the mask, for a query and a block of keys
_ALIBI = {None: "kNone", "linear": "kLinear", "distance": "kDistance"}
# Parameters behind the tensor maps and the log-sum-exp: pointers with their types, and
# numbers.
_POINTERS = {
    "counter": "unsigned*",
    "q_lengths": "const int*",
    "kv_lengths": "const int*",
    "q_segments": "const int*",
    "kv_segments": "const int*",
    "sinks": "const float*",
    "alibi_slopes": "const float*",
    "bias": "const void*",
    "map": "const unsigned*",
    "mask_words": "const unsigned*",
    "values": "const void*",
}
_INTEGERS = (
    *("batch", "q_len", "kv_len", "heads", "group", "left", "right", "ahead"),
    *("section", "map_example", "map_head", "bias_row", "mask_row"),
)
_LONG = ("bias_example", "bias_head", "mask_example", "mask_head")
_FACTORS = ("scale_log2", "unscale", "to_cap", "scale")
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


def slabs(columns: int) -> int:
    """Slabs of 64 columns that a row is stored in."""
    return -(-columns // ROWS)


def smem_bytes(
    problem: AttentionProblem, config: AttentionSm90Config, *, in_place: bool
) -> Any:
    """Shared memory of one block.

    Args:
      problem: the problem.
      config: the config.
      in_place: whether results are staged where the queries were.
    """
    keys, values = slabs(problem.head_dim), slabs(problem.columns)
    tile = config.tile_q * _ROW_BYTES
    ring = config.stages * (keys + values) * config.tile_kv * _ROW_BYTES
    staging = 0 if in_place else values * tile
    period = SWIZZLE_128B.period_bytes
    # The last for barriers, and one byte.
    return keys * tile + ring + staging + bias_bytes(problem, config) + period


def stages_in_place(
    problem: AttentionProblem, config: AttentionSm90Config, limit_bytes: int
) -> bool:
    """Whether there is no room for results beside the queries of the next tile.

    Results that are wider than queries never fit in their place.
    """
    fits = slabs(problem.columns) <= slabs(problem.head_dim)
    return fits and bool(smem_bytes(problem, config, in_place=False) > limit_bytes)


def tiles_q(problem: AttentionProblem, config: Any) -> int:
    """Tiles of queries of one head."""
    return -(-problem.q_len // config.tile_q)


def tile_count(problem: AttentionProblem, config: Any) -> int:
    """Tiles of queries of all heads of all examples."""
    return tiles_q(problem, config) * problem.heads * problem.batch


def scores(problem: AttentionProblem, config: Any) -> int:
    """Scores that are computed for one head: all of every block that a tile sees.

    Lengths are known on the device alone; here they count as whole.
    """
    left, right = rules.window(problem)
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
    columns = problem.head_dim + problem.columns
    bytes_of_keys = problem.kv_len * columns * _ITEMSIZE
    fitting = max(1, _SECTION_BYTES // bytes_of_keys) * group
    return min(fitting, problem.heads * problem.batch)


def grid(problem: AttentionProblem, config: AttentionSm90Config, sm_count: int) -> int:
    """Blocks of the launch."""
    tiles = tile_count(problem, config)
    return tiles if config.schedule == "grid" else min(tiles, sm_count)


def draws(config: Any) -> bool:
    """Whether the kernel needs a counter."""
    return config.schedule == "drawn"


def kernel(
    problem: AttentionProblem, config: AttentionSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes a forward problem with this config.

    Operands are those of ``operands``; results are o, the log-sum-exp if it is saved,
    and the counter again. What only the launch needs stays out of the source: one cubin
    serves all lengths and numbers of heads.
    """
    t = problem.dtype
    scores = Wgmma(n=config.tile_kv, lhs=t, rhs=t)
    sums = Wgmma(n=problem.columns, lhs=t, rhs=t, lhs_in_registers=True)
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


def operands(problem: AttentionProblem, config: Any) -> tuple[str, ...]:
    """Names of what the kernel reads: operands of the op, and buffers of the call."""
    p = problem
    there = {
        "bias": p.bias is not None,
        "q_lengths": p.q_lengths,
        "kv_lengths": p.kv_lengths,
        "q_segments": p.segments,
        "kv_segments": p.segments,
        "sinks": p.sinks,
        "alibi_slopes": p.alibi is not None,
        "map": rules.is_mapped(p),
        "mask_words": rules.reads_mask(p, config),
        "counter": draws(config),
    }
    return ("q", "k", "v", *(name for name, is_read in there.items() if is_read))


def entry_name(problem: AttentionProblem, config: AttentionSm90Config) -> str:
    """What the kernel computes and how, readable in a profiler; free of lengths."""
    choices = str(config).replace(" ", "_")
    return "_".join(("attention_sm90", *name_parts(problem), choices))


def name_parts(problem: AttentionProblem) -> tuple[str, ...]:
    """What a kernel computes, in words of its name."""
    left, right = rules.window(problem)
    parts = (
        DTYPES[problem.dtype][1],
        f"d{problem.head_dim}" + (f"v{problem.columns}" if problem.value_dim else ""),
        "left" if left is not None else "",
        "right" if right is not None else "",
        "qlen" if problem.q_lengths else "",
        "kvlen" if problem.kv_lengths else "",
        "end" if rules.shifts(problem) else "",
        "segments" if problem.segments else "",
        "mask" if problem.mask else "",
        "bias" if problem.bias else "",
        "cap" if problem.soft_cap else "",
        "sinks" if problem.sinks else "",
        f"alibi_{problem.alibi}" if problem.alibi else "",
        "lse" if problem.saves_lse else "",
    )
    return tuple(filter(None, parts))


def _params(
    problem: AttentionProblem, config: AttentionSm90Config
) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_source``."""
    p = problem
    number = {name: i for i, name in enumerate(operands(p, config))}
    out = len(number)
    left, right = rules.window(p)
    queries, keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    numbers = {
        "batch": p.batch,
        "q_len": p.q_len,
        "kv_len": p.kv_len,
        "heads": p.heads,
        "group": p.heads // p.kv_heads,
        "left": left or 0,
        "right": right or 0,
        "ahead": p.kv_len - p.q_len if p.aligned_at_end else 0,
        "section": section(p),
        **steps(p, config),
    }
    number["values"] = number["v"] if rules.is_mapped(p) else -1
    product = 1.0 if rules.biased_by_tiles(p) else p.scale  # what scores then lack
    cap = p.soft_cap or 1.0
    last = p.soft_cap or product
    factors = (last * math.log2(math.e), 1 / p.scale, product / cap, p.scale)
    return (
        operand_map(p, 0, queries, config.tile_q, p.head_dim),
        operand_map(p, 1, keys, config.tile_kv, p.head_dim),
        operand_map(p, 2, keys, config.tile_kv, p.columns),
        operand_map(p, out, queries, WARP_ROWS, p.columns),
        *(
            bias_map(p, number["bias"], config.tile_q)
            for _ in range(rules.biased_by_tiles(p))
        ),
        Pointer(operand=out + 1 if p.saves_lse else -1),
        *(Pointer(operand=number.get(name, -1)) for name in _POINTERS),
        *(Scalar(value=numbers[name]) for name in _INTEGERS),
        *(Scalar(value=numbers[name], dtype="int64") for name in _LONG),
        *(Scalar(value=value, dtype="float32") for value in factors),
    )


def buffer_shapes(
    problem: AttentionProblem, config: Any
) -> dict[str, tuple[int, int, int, int]]:
    """Of the map of blocks and of the mask's words, (examples, heads, rows, words)."""
    p = problem
    blocks = -(-p.kv_len // config.tile_kv)
    examples, heads, rows, _ = p.mask or (1, 1, 1, 1)
    words = 2 * -(-blocks // 32)
    return {
        "mask": (
            *(examples, heads, p.q_len if rows > 1 else 1),
            blocks * WORDS_OF_BLOCK,
        ),
        "map": (p.batch if p.segments else examples, heads, tiles_q(p, config), words),
    }


def steps(problem: AttentionProblem, config: Any) -> dict[str, int]:
    """Elements from one example, head and query to the next; 0 where they share."""
    bias = problem.bias or (1, 1, 1, 1)
    shapes = {"bias": bias, **buffer_shapes(problem, config)}
    found: dict[str, int] = {}
    for name, (examples, heads, queries, keys) in shapes.items():
        found[f"{name}_row"] = keys * (queries > 1)
        found[f"{name}_head"] = queries * keys * (heads > 1)
        found[f"{name}_example"] = heads * queries * keys * (examples > 1)
    return found


def operand_map(
    problem: AttentionProblem,
    operand: int,
    shape: tuple[int, int],
    rows: int,
    columns: int,
) -> TensorMap:
    """Boxes of ``rows`` queries or keys of a slab of one head of one example."""
    length, heads = shape
    row = columns * _ITEMSIZE
    return TensorMap(
        operand=operand,
        dtype=problem.dtype,
        dims=(columns, length, heads, problem.batch),
        strides=(heads * row, row, length * heads * row),
        box=(ROWS, rows, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def bias_bytes(problem: AttentionProblem, config: AttentionSm90Config) -> Any:
    """Shared memory for tiles of a bias."""
    if not rules.biased_by_tiles(problem):
        return 0
    return config.stages * config.tile_q * slabs(config.tile_kv) * _ROW_BYTES


def bias_map(problem: AttentionProblem, operand: int, rows: int) -> TensorMap:
    """Boxes of so many queries and 64 keys."""
    examples, heads, queries, keys = problem.bias or (1, 1, 1, 1)
    row = keys * _ITEMSIZE
    return TensorMap(
        operand=operand,
        dtype=problem.bias_dtype or problem.dtype,
        dims=(keys, queries, heads, examples),
        strides=(row, queries * row, heads * queries * row),
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
    left, right = rules.window(problem)
    bias, tiled = problem.bias or (1, 1, 1, 1), rules.biased_by_tiles(problem)
    producer, consumer = _REGISTERS[config.consumers]
    ring = Ring(stages=config.stages)
    typed = {
        **dict.fromkeys((*"qkvo", *("bias_tiles",) * tiled), _MAP),
        "lse": "float*",
        **_POINTERS,
        **dict.fromkeys(_INTEGERS, "int"),
        **dict.fromkeys(_LONG, "long long"),
        **dict.fromkeys(_FACTORS, "float"),
    }
    parameters = ", ".join(f"{cxx_type} {name}" for name, cxx_type in typed.items())
    maps = ["&q, &k, &v, &o", "&bias_tiles" if tiled else "nullptr"]
    arguments = ", ".join([*maps, *(n for n, t in typed.items() if t != _MAP)])
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
  using BiasElement = {rules.bias_element(problem)};
  static constexpr int kHeadDim = {problem.head_dim}, \
kSlabs = {slabs(problem.head_dim)}, kValueDim = {problem.columns}, \
kValueSlabs = {slabs(problem.columns)};
  static constexpr int kTileQ = {config.tile_q}, kTileKv = {config.tile_kv}, \
kStages = {config.stages}, kBiasSlabs = {slabs(config.tile_kv)};
  static constexpr bool kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)}, kQLengths = {cxx(problem.q_lengths)}, \
kKvLengths = {cxx(problem.kv_lengths)}, kFromEnd = {cxx(rules.shifts(problem))};
  static constexpr bool kMapped = {cxx(rules.is_mapped(problem))}, \
kSegments = {cxx(problem.segments)}, \
kMaskBits = {cxx(bool(rules.reads_mask(problem, config)))};
  static constexpr bool kBiased = {cxx(problem.bias is not None)}, \
kBiasKeys = {cxx(bias[3] > 1)}, kBiasPairs = {cxx(bias[3] % 2 == 0)}, \
kBiasTiles = {cxx(tiled)}, kBiasHeads = {cxx(bias[1] > 1)}, \
kBiasExamples = {cxx(bias[0] > 1)}, \
kExamplesFirst = {cxx(tiled and bias[0] == 1 < problem.batch)}, \
kSoftCap = {cxx(problem.soft_cap is not None)}, kSinks = {cxx(problem.sinks)};
  static constexpr tracea::Alibi kAlibi = tracea::Alibi::{_ALIBI[problem.alibi]};
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
{entry_name(problem, config)}({parameters}) {{
  tracea::attention_sm90<Traits>({{{arguments}}});
}}
"""
