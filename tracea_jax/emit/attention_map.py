"""The kernel that finds which blocks of keys attention_sm90's tiles see.

It reads segment ids and boolean masks and writes the map of blocks, the words of a mask
whose scores are looked at one by one, and the counter of drawn tiles: one launch before
that of the attention. A config has ``tile_q``, ``tile_kv`` and ``schedule``. Caller:
``variants.attention_steps``.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.attention_rules import reads_mask
from tracea_jax.emit.attention_sm90 import (
    buffer_shapes,
    draws,
    tiles_q,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import AttentionProblem

_THREADS = 1024
_TILES = 32  # of a thread block, where no entry of a mask is read for each score
_WORD_BYTES = 4  # entries that are read at once
_POINTERS = {
    "q_segments": "const int*",
    "kv_segments": "const int*",
    "mask": "const unsigned char*",
    "map": "unsigned*",
    "mask_words": "unsigned*",
    "counter": "unsigned*",
}
# Where entries of a mask lie, and what they stand for: see ``mask_steps``.
MASK_INTEGERS = ("block_queries", "block_kv", "mask_row", "mask_key")
MASK_LONG = ("mask_example", "mask_head")
_INTEGERS = ("q_len", "kv_len", "heads", *MASK_INTEGERS)


def reads(problem: AttentionProblem) -> tuple[str, ...]:
    """Names of the operands."""
    p = problem
    return ("q_segments", "kv_segments") * p.segments + ("mask",) * bool(p.mask)


def writes(problem: AttentionProblem, config: Any) -> tuple[str, ...]:
    """Names of the results."""
    words = ("mask_words",) * bool(reads_mask(problem, config))
    return ("map", *words, *("counter",) * draws(config))


def kernel(problem: AttentionProblem, config: Any, device: CudaDevice) -> Kernel:
    """The kernel of a problem with segments or a mask, and of a config's tiles."""
    p = problem
    looks = bool(reads_mask(p, config))
    mask = ("kScores" if looks else "kBlocks") if p.mask else "kNone"
    entry = f"attention_map_{config.tile_q}x{config.tile_kv}_{mask[1:].lower()}"
    entry += "_segments" * p.segments
    names = (*reads(p), *writes(p, config))
    examples, heads, _, words = buffer_shapes(p, config)["map"]
    groups = -(-tiles_q(p, config) // (1 if looks else _TILES))
    numbers = _numbers(p, heads)
    typed = {
        **_POINTERS,
        **dict.fromkeys(_INTEGERS, "int"),
        **dict.fromkeys(MASK_LONG, "long long"),
    }
    parameters = ", ".join(f"{cxx_type} {name}" for name, cxx_type in typed.items())
    source = f"""\
// attention_map | {config.tile_q} queries, {config.tile_kv} keys
#include "attention_map.cuh"

namespace {{
struct Traits {{
  static constexpr int kTileQ = {config.tile_q}, kTileKv = {config.tile_kv};
  static constexpr bool kSegments = {cxx(p.segments)}, \
kWhole = {cxx(_is_whole(p))}, kOfOne = {cxx(p.mask_block is None)};
  static constexpr tracea::MapMask kMask = tracea::MapMask::{mask};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({_THREADS})
{entry}({parameters}) {{
  tracea::attention_map<Traits>({{{", ".join(typed)}}});
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers("attention_map.cuh"),
        arch=device.arch,
        grid=(examples * heads * groups * (words // 2), 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=0,
        params=(
            *(
                Pointer(operand=names.index(name) if name in names else -1)
                for name in _POINTERS
            ),
            *(Scalar(value=numbers[name]) for name in _INTEGERS),
            *(Scalar(value=numbers[name], dtype="int64") for name in MASK_LONG),
        ),
    )


def _is_whole(problem: AttentionProblem) -> bool:
    """Returns whether the entries of a mask can be read in words."""
    p = problem
    if p.mask is None or p.mask_block is not None:
        return False
    return p.mask[3] == p.kv_len and p.kv_len % _WORD_BYTES == 0


def _numbers(problem: AttentionProblem, heads: int) -> dict[str, int]:
    """By the names of the parameters."""
    p = problem
    lengths = {"q_len": p.q_len, "kv_len": p.kv_len}
    return {**lengths, "heads": heads, **mask_steps(p)}


def mask_steps(problem: AttentionProblem) -> dict[str, int]:
    """Entries of a mask from one to the next; steps are 0 where entries are shared."""
    examples, own_heads, rows, keys = problem.mask or (1, 1, 1, 1)
    block_queries, block_kv = problem.mask_block or (1, 1)
    return {
        "block_queries": block_queries,
        "block_kv": block_kv,
        "mask_row": keys * (rows > 1),
        "mask_key": int(keys > 1),
        "mask_example": own_heads * rows * keys * (examples > 1),
        "mask_head": rows * keys * (own_heads > 1),
    }
