"""attention_backward_sm80 as text and numbers: its config and its kernels.

    keys      dk and dv, a tile of keys after the other
    queries   dq, a tile of queries after the other

Both are one template. What a tile is made of is its ``Side``: whose rows it owns, and
which it meets. Before them runs the kernel of ``attention_backward_kernels`` that finds
two numbers of each query. Caller: ``variants.attention_backward_sm80``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sides as sides
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit import sources
from tracea_jax.emit.attention_backward_sm90 import padded
from tracea_jax.emit.attention_sides import Side
from tracea_jax.emit.attention_sm80 import rule_traits, scalars
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import AttentionProblem

_WARP = 32
_BAND = 16  # rows that a warp multiplies at once
_ROW_BYTES = 128  # of a slab
# Parameters: pointers with their types, and numbers.
_POINTERS = {
    **dict.fromkeys(("own", "own_values", "other", "other_values"), "const void*"),
    **dict.fromkeys(("d_own", "d_own_values"), "void*"),
    **dict.fromkeys(("rows", "everywhere"), "const float*"),
    **dict.fromkeys(("own_lengths", "other_lengths"), "const int*"),
    **dict.fromkeys(("own_segments", "other_segments"), "const int*"),
    **dict.fromkeys(("map", "mask"), "const unsigned*"),
}
_INTEGERS = (
    *("batch", "own_len", "other_len", "heads", "padded", "group", "left", "right"),
    *("section", "map_example", "map_head", "mask_row"),
)
_LONG = ("mask_example", "mask_head")
_FACTORS = ("scale", "scale_log2", "to_cap")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackwardSm80Config:
    """The free choices of attention_backward_sm80.

    Attributes:
      tile_kv: keys of a tile of the kernel for dk and dv.
      block_q: queries that it takes at a time.
      tile_q: queries of a tile of the kernel for dq.
      block_kv: keys that it takes at a time.
      warps: of a block; each owns 16 or 32 rows.
      stages: blocks of rows that shared memory holds.
    """

    tile_kv: int
    block_q: int
    tile_q: int
    block_kv: int
    warps: int
    stages: int = 2

    @property
    def threads(self) -> int:
        return _WARP * self.warps

    @property
    def dq(self) -> str:
        """It adds nothing in memory, see ``AttentionBackwardSm90Config``."""
        return "recomputed"

    @property
    def adds(self) -> bool:
        return False

    def __str__(self) -> str:
        tiles = f"{self.tile_kv}x{self.block_q} {self.tile_q}x{self.block_kv}"
        return f"{tiles} w{self.warps} s{self.stages}"


def side_of_queries(
    problem: AttentionProblem, config: AttentionBackwardSm80Config
) -> Side:
    """dq: tiles of queries meet blocks of keys."""
    return sides.of_queries(problem, config.tile_q, config.block_kv)


def side_of_keys(
    problem: AttentionProblem, config: AttentionBackwardSm80Config
) -> Side:
    """dk, dv: tiles of keys meet blocks of queries."""
    return sides.of_keys(problem, config.tile_kv, config.block_q)


def smem_bytes(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    *,
    of_keys: bool,
) -> Any:
    """Shared memory of a block: its own rows, and a ring of other ones."""
    own, other = _rows(config, of_keys=of_keys)
    slabs = forward.slabs(problem.head_dim) * _ROW_BYTES
    stage = 2 * slabs * other + 2 * 4 * other * of_keys
    return 2 * slabs * own + config.stages * stage


def _rows(config: AttentionBackwardSm80Config, *, of_keys: bool) -> tuple[int, int]:
    """Own rows of a tile, other rows of a block."""
    if of_keys:
        return config.tile_kv, config.block_q
    return config.tile_q, config.block_kv


def registers(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    *,
    of_keys: bool,
) -> Any:
    """Registers of a thread: sums, two blocks of scores, and rounded ones."""
    _, other = _rows(config, of_keys=of_keys)
    of_band = sums(problem, of_keys=of_keys) + other + other // 4
    return bands(config, of_keys=of_keys) * of_band


def sums(problem: AttentionProblem, *, of_keys: bool) -> int:
    """Accumulators of a thread and a band: two products for keys, one for queries."""
    return (1 + of_keys) * problem.head_dim // 2


def bands(config: AttentionBackwardSm80Config, *, of_keys: bool) -> Any:
    """Bands of the kernel's own rows in a warp."""
    own, _ = _rows(config, of_keys=of_keys)
    return own // (_BAND * config.warps)


def reads(side: Side, has_blind: bool) -> tuple[str, ...]:
    """Operands of a kernel: of the op, and buffers of the call."""
    p = side.problem
    there = {
        side.of("q_lengths"): p.q_lengths,
        side.of("kv_lengths"): p.kv_lengths,
        "q_segments": p.segments,
        "kv_segments": p.segments,
        side.buffer("map"): rules.is_mapped(p),
        side.buffer("mask_words"): rules.reads_mask(p, side),
        "everywhere": side.of_keys and has_blind,
    }
    read = (name for name, is_read in there.items() if is_read)
    return ("q", "k", "v", "do", "rows", *read)


def results(side: Side) -> tuple[str, ...]:
    """Results of a kernel."""
    return ("dk", "dv") if side.of_keys else ("dq",)


def kernel(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    device: CudaDevice,
    side: Side,
    has_blind: bool,
) -> Kernel:
    """The kernel of one side; operands are those of ``reads``, then ``results``."""
    own, other = (
        (("k", "v"), ("q", "do")) if side.of_keys else (("q", "do"), ("k", "v"))
    )
    names = {
        **dict(zip(("own", "own_values"), own, strict=True)),
        **dict(zip(("other", "other_values"), other, strict=True)),
        **dict(zip(("d_own", "d_own_values"), results(side), strict=False)),
        **{n: n for n in ("rows", "everywhere")},
        "own_lengths": side.of("q_lengths"),
        "other_lengths": side.of("kv_lengths"),
        "own_segments": side.of("q_segments"),
        "other_segments": side.of("kv_segments"),
        "map": side.buffer("map"),
        "mask": side.buffer("mask_words"),
    }
    operands = (*reads(side, has_blind), *results(side))
    number = {name: i for i, name in enumerate(operands)}
    heads = problem.kv_heads if side.of_keys else problem.heads
    tiles = -(-side.problem.q_len // side.tile_q)
    smem = int(smem_bytes(problem, config, of_keys=side.of_keys))
    has_everywhere = has_blind and side.of_keys
    entry = _entry_name(problem, config, side, has_everywhere)
    params: tuple[Param, ...] = (
        *(Pointer(operand=number.get(names.get(n, ""), -1)) for n in _POINTERS),
        *_scalars(problem, config, side, heads),
    )
    return Kernel(
        entry=entry,
        source=_source(problem, config, side, has_everywhere, smem, entry),
        headers=sources.headers("attention_backward_sm80.cuh"),
        arch=device.arch,
        grid=(tiles * heads * problem.batch, 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem,
        params=params,
    )


def _window(problem: AttentionProblem, side: Side) -> tuple[int | None, int | None]:
    left, right = rules.window(problem)
    return (right, left) if side.of_keys else (left, right)


def _scalars(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    side: Side,
    heads: int,
) -> tuple[Scalar, ...]:
    p, c = problem, cast("Any", config)
    group = p.heads // p.kv_heads
    left, right = _window(p, side)
    section = forward.section(p)
    numbers = {
        **{"batch": p.batch, "heads": heads, "group": group},
        **{"own_len": side.problem.q_len, "other_len": side.problem.kv_len},
        **{"padded": padded(p, c), "left": left or 0, "right": right or 0},
        "section": max(1, section // group) if side.of_keys else section,
        **forward.steps(side.problem, side),
    }
    scale = p.soft_cap or p.scale
    factors = (p.scale, scale * math.log2(math.e), p.scale / (p.soft_cap or 1.0))
    return scalars(numbers, _INTEGERS, _LONG, factors)


def _entry_name(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    side: Side,
    has_everywhere: bool,
) -> str:
    parts = (f"attention_backward_{side.name}_sm80", *forward.name_parts(problem))
    sizes = f"{side.tile_q}x{side.tile_kv}_w{config.warps}_s{config.stages}"
    return "_".join((*parts, *["everywhere"] * has_everywhere, sizes))


def _source(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    side: Side,
    has_everywhere: bool,
    smem: int,
    entry: str,
) -> str:
    """The translation unit: Traits and one entry."""
    p = problem
    typed = {
        **_POINTERS,
        **dict.fromkeys(_INTEGERS, "int"),
        **dict.fromkeys(_LONG, "long long"),
        **dict.fromkeys(_FACTORS, "float"),
    }
    parameters = ", ".join(f"{cxx_type} {name}" for name, cxx_type in typed.items())
    reads_mask = rules.reads_mask(side.problem, side)
    return f"""\
// attention_backward_sm80 | {side.name} | {p.dtype} dim {p.head_dim} | {config}
#include "attention_backward_sm80.cuh"

namespace {{
struct Traits {{
  using Element = {forward.DTYPES[p.dtype][0]};
  using BiasElement = float;
  static constexpr int kHeadDim = {p.head_dim};
  static constexpr int kTileQ = {side.tile_q}, kTileKv = {side.tile_kv}, \
kWarps = {config.warps}, kStages = {config.stages};
{rule_traits(p, _window(p, side), reads_mask)}
  static constexpr bool kOfKeys = {cxx(side.of_keys)}, \
kEverywhere = {cxx(has_everywhere)}, kBiasPairs = false;
  static constexpr int kThreads = {config.threads}, kSmemBytes = {smem};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry}({parameters}) {{
  tracea::attention_backward_sm80<Traits>({{{", ".join(typed)}}});
}}
"""
