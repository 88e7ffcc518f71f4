"""attention_sm90 as numbers: its config, what it takes, and the maps of operands.

A config holds the free choices; shared memory, registers, the grid and the order of
tiles follow from it and the problem, by the pure functions here. The device code
asserts that it arrives at the same numbers. Caller: ``variants.attention_sm90``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit.kernel import (
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.problem import AttentionProblem

DTYPES = {"bfloat16": ("tracea::bf16", "bf16"), "float16": ("tracea::f16", "f16")}
BIAS_DTYPES = ("bfloat16", "float16", "float32")
ROWS = 64  # queries of a consumer; also columns of a slab
WARPGROUP = 128
WARP_ROWS = 16  # of the result, that a warp stores
SCHEDULES = ("drawn", "static", "grid")
ITEMSIZE = 2
_ROW_BYTES = 128  # of a slab
_WIDEST_OF_TWO = 128  # columns of values with which there are two tiles of queries
_SECTION_BYTES = 32 << 20  # of keys and values that stay in L2 beside all else
# Where a tile sees some blocks here and there: 1 to 2.5 % faster on an H200.
_SECTION_BYTES_MASKED = 16 << 20
WORDS_OF_BLOCK = 4  # of the mask, for a query and a block of keys


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
      packed: whether a tile has queries of all heads that share keys, side by side.
    """

    tile_q: int
    tile_kv: int
    stages: int = 2
    ping_pong: bool = True
    overlap: bool = True
    schedule: str = "drawn"
    packed: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile_q // ROWS

    @property
    def threads(self) -> int:
        """The consumers and one warpgroup for the producer."""
        return WARPGROUP * (1 + self.consumers)

    def __str__(self) -> str:
        how = " pp" * self.ping_pong + " ov" * self.overlap + " packed" * self.packed
        return f"{self.tile_q}x{self.tile_kv} s{self.stages}{how} {self.schedule}"


def slabs(columns: int) -> int:
    """Slabs of 64 columns that a row is stored in."""
    return -(-columns // ROWS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Shared memory that keys and values leave free.

    Attributes:
      stages_q: tiles of queries: with two, those of the next tile come early.
      in_place: whether results are staged where the queries were.
    """

    stages_q: int
    in_place: bool


def least_room(problem: AttentionProblem) -> Room:
    """Free shared memory that every config has.

    Results that are wider than queries never fit in their place.
    """
    fits = slabs(problem.columns) <= slabs(problem.head_dim)
    return Room(stages_q=1, in_place=fits)


def room(
    problem: AttentionProblem, config: AttentionSm90Config, limit_bytes: int
) -> Room:
    """The most that fits into so many bytes.

    Wide values and caps leave no registers for where a second tile of queries lies.
    """
    least = least_room(problem)
    is_tight = problem.columns > _WIDEST_OF_TWO or problem.soft_cap is not None
    rooms = [
        Room(stages_q=stages_q, in_place=in_place)
        for stages_q in ((1,) if is_tight else (2, 1))
        for in_place in (False, True)[: 1 + least.in_place]
    ]
    fitting = (r for r in rooms if smem_bytes(problem, config, r) <= limit_bytes)
    return next(fitting, least)


def smem_bytes(
    problem: AttentionProblem, config: AttentionSm90Config, room: Room
) -> Any:
    """Shared memory of one block."""
    keys, values = slabs(problem.head_dim), slabs(problem.columns)
    tile = config.tile_q * _ROW_BYTES
    ring = config.stages * (keys + values) * config.tile_kv * _ROW_BYTES
    tiles = room.stages_q * keys + (not room.in_place) * values
    period = SWIZZLE_128B.period_bytes
    # The last for barriers, and one byte.
    return tiles * tile + ring + bias_bytes(problem, config) + period


def tiles_q(problem: AttentionProblem, config: Any) -> int:
    """Tiles of queries of one head that is not packed with others."""
    return -(-problem.q_len // config.tile_q)


def packed_heads(problem: AttentionProblem, config: AttentionSm90Config) -> int:
    """Heads of which a tile has queries."""
    return problem.heads // problem.kv_heads if config.packed else 1


def tile_count(problem: AttentionProblem, config: AttentionSm90Config) -> int:
    """Tiles of queries of all heads of all examples."""
    packed = packed_heads(problem, config)
    tiles = -(-problem.q_len * packed // config.tile_q)
    return tiles * (problem.heads // packed) * problem.batch


def scores(problem: AttentionProblem, config: AttentionSm90Config) -> float:
    """Scores that are computed for one head: all of every block that a tile sees.

    Lengths are known on the device alone; here they count as whole.
    """
    packed = packed_heads(problem, config)
    queries = config.tile_q // packed  # of a tile
    left, right = rules.window(problem)
    every = problem.kv_len
    keys = KeyInterval(kv_len=every, limit=every, left=left, right=right)
    seen = (
        keys.blocks(q, min(q + queries, problem.q_len) - 1, config.tile_kv).count
        for q in range(0, problem.q_len, queries)
    )
    return sum(seen) * queries * config.tile_kv


def section(problem: AttentionProblem) -> int:
    """Heads whose tiles are neighbours in the order of tiles, if none are packed.

    Heads that share keys lie side by side, and their keys count once.
    """
    group = problem.heads // problem.kv_heads
    columns = problem.head_dim + problem.columns
    bytes_of_keys = problem.kv_len * columns * ITEMSIZE
    is_scattered = problem.mask is not None and not problem.segments
    section_bytes = _SECTION_BYTES_MASKED if is_scattered else _SECTION_BYTES
    fitting = max(1, section_bytes // bytes_of_keys) * group
    return min(fitting, problem.heads * problem.batch)


def grid(problem: AttentionProblem, config: AttentionSm90Config, sm_count: int) -> int:
    """Blocks of the launch."""
    tiles = tile_count(problem, config)
    return tiles if config.schedule == "grid" else min(tiles, sm_count)


def draws(config: Any) -> bool:
    """Returns whether the kernel needs a counter."""
    return config.schedule == "drawn"


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


def name_parts(problem: AttentionProblem) -> tuple[str, ...]:
    """Parts of a kernel's name that say what it computes."""
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


def buffer_shapes(
    problem: AttentionProblem, config: Any
) -> dict[str, tuple[int, int, int, int]]:
    """Shapes (examples, heads, rows, words) of the block map and the mask's words."""
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
    row = columns * ITEMSIZE
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
    row = keys * ITEMSIZE
    return TensorMap(
        operand=operand,
        dtype=problem.bias_dtype or problem.dtype,
        dims=(keys, queries, heads, examples),
        strides=(row, queries * row, heads * queries * row),
        box=(ROWS, rows, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )
